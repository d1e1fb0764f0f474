"""All sequences of all links over one drafter: opened within bounds, prepared in pieces, freed."""

from array import array
from typing import Generic

import numpy as np

from draft_service.codec import RowReplies
from draft_service.counters import Counters
from draft_service.drafters.drafter import Drafter, State
from draft_service.feature_columns import NO_FEATURES, SentFeatures, features_of_open
from draft_service.link_sessions import LinkSessions
from draft_service.sampling import sampling_of
from draft_service.sessions import Session
from outrider.serving.columns import MalformedColumn, unpack
from outrider.serving.errors import InvalidArgument
from outrider.serving.link_protocol import TOKEN_ID
from outrider.v1 import draft_pb2

# Tokens of an Open whose hash is checked in one piece: about 0.3 ms.
CHECKED_TOKENS_PER_PIECE = 256


class SessionTable(Generic[State]):
    """Owned by the engine thread. Every session in a link's LinkSessions is counted here."""

    def __init__(self, *, drafter: Drafter[State], max_sequences: int, counters: Counters) -> None:
        self.drafter = drafter
        self.counters = counters
        self._max_sequences = max_sequences
        self._session_count = 0
        # In the order in which their turn comes.
        self._unprepared: dict[Session[State], LinkSessions[State]] = {}

    def __len__(self) -> int:
        return self._session_count

    @property
    def has_unprepared(self) -> bool:
        """There is work for `prepare`."""
        return bool(self._unprepared)

    def open(self, link: LinkSessions[State], message: draft_pb2.Open, replies: RowReplies) -> None:
        """Replaces what the slot held, or refuses to."""
        replaced = link.take(message.slot)
        if replaced is not None:
            self._free(replaced)
        opened = self._open_in_free_slot(link, message)
        if not isinstance(opened, Session):
            link.remember_refusal(message.slot, message.generation, opened)
            replies.refuse(message.slot, message.generation, opened)
        elif not self.add_features(opened, self._features_in(link, message)):
            replies.resync(message.slot, message.generation, opened.length)

    def close(self, link: LinkSessions[State], slot: int, generation: int) -> None:
        """Forgets this generation, and that it was refused. Unknown ones are ignored."""
        session = link.find(slot, generation)
        if session is not None:
            link.take(slot)
            self._free(session)
        elif link.refusal(slot, generation) is not None:
            link.take(slot)

    def close_all(self, link: LinkSessions[State]) -> None:
        """Forgets everything of a link."""
        for session in link.take_all():
            self._free(session)

    def refuse(self, link: LinkSessions[State], session: Session[State], reason: int) -> None:
        """Closes a session that cannot be served any more, and remembers why."""
        self.close(link, session.slot, session.generation)
        link.remember_refusal(session.slot, session.generation, reason)

    def add_features(self, session: Session[State], features: SentFeatures) -> bool:
        """Hands them to the drafter; False where what it lacks takes another Open.

        Those of tokens that are not committed, or of the last one, are left out: there are none.
        """
        needs = self.drafter.offer.feature_needs
        if features.are_lost:
            self.counters.count("lost features", f"slot {session.slot}: not in the shared memory")
            return False
        if features.rows is None or needs is None:
            return True
        first = features.rows.first_position
        end = first + len(features.rows.rows) // needs.row_bytes
        if end >= session.length:
            self.counters.count(
                "features out of bounds",
                f"slot {session.slot}: positions {first} to {end - 1} of {session.length} tokens",
            )
            return True
        if not self.drafter.add_features(session.state, features.rows):
            self.counters.count("feature gaps", f"slot {session.slot}: before position {first}")
            return False
        return True

    def work_ahead(self, link: LinkSessions[State], session: Session[State]) -> None:
        """Puts a session among those that `prepare` works on, if there is anything to do."""
        if self.drafter.backlog(session.state) > 0:
            self._unprepared[session] = link

    def fall_behind(self, link: LinkSessions[State], session: Session[State]) -> None:
        """Puts a session among those that `prepare` works on, before its backlog is too long."""
        if self.drafter.backlog(session.state) > self.drafter.max_backlog // 2:
            self._unprepared[session] = link

    def is_prepared(self, session: Session[State]) -> bool:
        """A draft may be asked of the session now. A short Open is checked on the spot."""
        if not session.is_checked and session.opening_length <= CHECKED_TOKENS_PER_PIECE:
            session.check_opening(CHECKED_TOKENS_PER_PIECE)
        return (
            session.is_checked and self.drafter.backlog(session.state) <= self.drafter.max_backlog
        )

    def prepare(self, budget_seconds: float) -> tuple[LinkSessions[State], Session[State]] | None:
        """One bounded piece of work. Returns a session, now closed, whose Open lied of its hash."""
        for session, link in self._unprepared.items():
            if not session.is_checked:
                if session.check_opening(CHECKED_TOKENS_PER_PIECE):
                    return None
                self.close(link, session.slot, session.generation)
                return link, session
        backlog = self._backlog()
        if backlog:
            self.drafter.prepare([session.state for session in self._unprepared], budget_seconds)
            if self._backlog() == backlog:
                # Not one could go on: all wait for features, which put them back here.
                self._unprepared.clear()
        return None

    def _backlog(self) -> int:
        """Of all sessions that are not prepared; those without one are prepared."""
        total = 0
        for session in list(self._unprepared):
            backlog = self.drafter.backlog(session.state)
            if backlog == 0:
                del self._unprepared[session]
            total += backlog
        return total

    def _features_in(self, link: LinkSessions[State], message: draft_pb2.Open) -> SentFeatures:
        needs = self.drafter.offer.feature_needs
        if needs is None or not message.HasField("features"):
            return NO_FEATURES
        try:
            return features_of_open(
                message.features, row_bytes=needs.row_bytes, ring=link.terms.feature_ring
            )
        except MalformedColumn as error:
            self.counters.count("malformed features", f"open of slot {message.slot}: {error}")
            return NO_FEATURES

    def _open_in_free_slot(
        self, link: LinkSessions[State], message: draft_pb2.Open
    ) -> Session[State] | int:
        """The new session, or the RefuseReason."""
        try:
            sampling = sampling_of(message.sampling)
            token_ids = _opening_tokens(message, link.terms.vocab_size)
        except (InvalidArgument, MalformedColumn) as error:
            self.counters.count("invalid opens", f"slot {message.slot}: {error}")
            return draft_pb2.REFUSE_REASON_INVALID
        offer = self.drafter.offer
        if len(token_ids) > offer.max_sequence_length:
            return draft_pb2.REFUSE_REASON_TOO_LONG
        if self._session_count >= self._max_sequences:
            self.counters.count(
                "refused for capacity", f"{self._session_count} sequences of {self._max_sequences}"
            )
            return draft_pb2.REFUSE_REASON_CAPACITY
        state = self.drafter.open(token_ids, sampling)
        if not self.drafter.reserve(state, len(token_ids)):
            self.drafter.close(state)
            self.counters.count("refused for capacity", f"no memory for {len(token_ids)} tokens")
            return draft_pb2.REFUSE_REASON_CAPACITY
        session = Session(
            slot=message.slot,
            generation=message.generation,
            token_ids=token_ids,
            prefix_hash=message.prefix_hash,
            state=state,
        )
        link.add(session)
        self._session_count += 1
        self._unprepared[session] = link
        return session

    def _free(self, session: Session[State]) -> None:
        self._unprepared.pop(session, None)
        self._session_count -= 1
        self.drafter.close(session.state)


def _opening_tokens(message: draft_pb2.Open, vocab_size: int) -> "array[int]":
    """The tokens of an Open. Raises InvalidArgument or MalformedColumn."""
    if len(message.token_ids) % 4:
        unpack("token_ids", message.token_ids, TOKEN_ID)
    column = np.frombuffer(message.token_ids, dtype=TOKEN_ID)
    if len(column) == 0:
        raise InvalidArgument("token_ids", [], "at least one token")
    lowest, highest = int(column.min()), int(column.max())
    if lowest < 0 or highest >= vocab_size:
        raise InvalidArgument(
            "token_ids", lowest if lowest < 0 else highest, f"between 0 and {vocab_size - 1}"
        )
    return array("i", column.astype("=i4").tobytes())
