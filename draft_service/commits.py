"""What a Step's row does to its session: the row's checks, its commit, and what is answered."""

from typing import Generic

from draft_service.codec import RowReplies, StepRow
from draft_service.drafters.drafter import DrafterOffer, State
from draft_service.link_sessions import LinkSessions
from draft_service.session_table import SessionTable
from draft_service.sessions import Commit, Session
from outrider.v1 import draft_pb2


class Commits(Generic[State]):
    """Applies the rows of one link's Step; what is wrong with one never touches another."""

    def __init__(
        self,
        *,
        table: SessionTable[State],
        link: LinkSessions[State],
        replies: RowReplies,
        is_aligned: bool,
    ) -> None:
        self._table = table
        self._link = link
        self._replies = replies
        self._is_aligned = is_aligned

    def apply(self, row: StepRow) -> Session[State] | None:
        """The row's session if a draft may continue the row's base, else None."""
        session = self._link.find(row.slot, row.generation)
        if session is None:
            self._answer_unknown(row)
            return None
        if not self._has_tokens(row, session) or not self._commit(row, session):
            return None
        length = row.base_length + draft_length_of(row, self._table.drafter.offer)
        if not self._table.drafter.reserve(session.state, length):
            self._table.counters.count("refused for capacity", f"no memory for {length} tokens")
            self._refuse(session, draft_pb2.REFUSE_REASON_CAPACITY)
            return None
        # Behind the reservation: what was committed is worked on whatever becomes of this row.
        if row.draft_length > self._link.terms.max_draft_length:
            self._table.counters.count(
                "draft lengths out of bounds",
                f"slot {row.slot}: {row.draft_length}, at most {self._link.terms.max_draft_length}",
            )
            return None
        if row.features.rows is not None and not (row.commit_count or row.draft_length):
            # The target still works on the prompt: this is the time to work on it here as well.
            self._table.work_ahead(self._link, session)
        else:
            self._table.fall_behind(self._link, session)
        return session

    def _answer_unknown(self, row: StepRow) -> None:
        reason = self._link.refusal(row.slot, row.generation)
        if reason is None:
            self._replies.resync(row.slot, row.generation, 0)
        else:
            self._replies.refuse(row.slot, row.generation, reason)

    def _has_tokens(self, row: StepRow, session: Session[State]) -> bool:
        vocab_size = self._link.terms.vocab_size
        if row.token_ids is not None and (
            not row.token_ids or (min(row.token_ids) >= 0 and max(row.token_ids) < vocab_size)
        ):
            return True
        self._table.counters.count(
            "rows with bad tokens",
            f"slot {row.slot}: {row.commit_count} tokens, vocabulary {vocab_size}",
        )
        if row.token_ids is None or not self._is_aligned:
            # Perhaps another row's tokens: not enough to refuse this one.
            self._replies.resync(row.slot, row.generation, session.length)
        else:
            self._refuse(session, draft_pb2.REFUSE_REASON_INVALID)
        return False

    def _commit(self, row: StepRow, session: Session[State]) -> bool:
        """Applies it; False where there is nothing to continue."""
        assert row.token_ids is not None
        if row.base_length > self._table.drafter.offer.max_sequence_length:
            self._refuse(session, draft_pb2.REFUSE_REASON_TOO_LONG)
            return False
        outcome = session.commit(
            base_length=row.base_length,
            prefix_hash=row.prefix_hash,
            count=row.commit_count,
            token_ids=row.token_ids,
        )
        if outcome is Commit.STALE:
            self._table.counters.count("stale rows", _words(row, session))
            return False
        if outcome is Commit.GAP or outcome is Commit.MISMATCH:
            detail = f"{_words(row, session)}: {outcome.name.lower()}"
            self._table.counters.count("resyncs", detail)
            self._replies.resync(row.slot, row.generation, session.length)
            return False
        if not self._table.add_features(session, row.features):
            # Its commits count all the same, and so does what n-grams may make of them.
            self._replies.resync(row.slot, row.generation, session.length)
        return True

    def _refuse(self, session: Session[State], reason: int) -> None:
        self._table.refuse(self._link, session, reason)
        self._replies.refuse(session.slot, session.generation, reason)


def draft_length_of(row: StepRow, offer: DrafterOffer) -> int:
    """Tokens that are proposed for a row: what was asked, within the drafter's bounds."""
    return min(
        row.draft_length, offer.max_draft_length, offer.max_sequence_length - row.base_length
    )


def _words(row: StepRow, session: Session[State]) -> str:
    return f"slot {row.slot}: {row.base_length} tokens, held {session.length}"
