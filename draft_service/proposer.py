"""From the messages of all links to their answers: commits, proposals, and work in between.

Owned by one thread. It knows neither gRPC streams nor threads.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic

from draft_service.codec import DraftRow, RowReplies, StepRow, decode_step, encode_draft
from draft_service.commits import Commits, draft_length_of
from draft_service.counters import Counters
from draft_service.drafters.drafter import Drafter, State, Wish
from draft_service.link_sessions import LinkSessions, LinkTerms
from draft_service.session_table import SessionTable
from draft_service.sessions import Session
from outrider.serving.columns import MalformedColumn, unpack
from outrider.serving.link_protocol import GENERATION, SLOT
from outrider.v1 import draft_pb2

# How long a piece of preparation may keep a Step waiting: while drafts are being asked for, and
# while nobody has asked for some time.
BUSY_PIECE_SECONDS = 0.02
IDLE_PIECE_SECONDS = 0.1
IDLE_AFTER_SECONDS = 0.5

Answer = tuple[LinkTerms, draft_pb2.LinkResponse]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked(Generic[State]):
    """A Step that wants drafts, its commits applied."""

    link: LinkSessions[State]
    step_id: int
    received_at: float
    expires_at: float
    # Rows that asked, with their sessions; None where there can be no draft.
    rows: list[tuple[StepRow, Session[State] | None]]


class Proposer(Generic[State]):
    """All links over one drafter.

    A turn is: `receive` for every message at hand, `propose`, `take_answers`; and `prepare` while
    nothing comes.
    """

    def __init__(
        self,
        *,
        drafter: Drafter[State],
        draft_boot_id: int,
        max_sequences: int,
        activity: Callable[[str], AbstractContextManager[None]],
        counters: Counters,
    ) -> None:
        needs = drafter.offer.feature_needs
        self._feature_row_bytes = needs.row_bytes if needs is not None else 0
        self._drafter = drafter
        self._draft_boot_id = draft_boot_id
        self._activity = activity
        self._counters = counters
        self._table = SessionTable(drafter=drafter, max_sequences=max_sequences, counters=counters)
        self._links: dict[LinkTerms, LinkSessions[State]] = {}
        self._asked: list[_Asked[State]] = []
        self._answers: list[Answer] = []
        self._asked_at = float("-inf")

    @property
    def session_count(self) -> int:
        """Sequences held, of all links."""
        return len(self._table)

    @property
    def has_unprepared(self) -> bool:
        """There is work for `prepare`."""
        return self._table.has_unprepared

    def attach(self, terms: LinkTerms) -> None:
        """A stream whose handshake succeeded."""
        self._links[terms] = LinkSessions(terms)

    def detach(self, terms: LinkTerms) -> None:
        """The stream ended; nothing of it is kept."""
        self._table.close_all(self._links.pop(terms))

    def receive(self, terms: LinkTerms, request: draft_pb2.LinkRequest, received_at: float) -> None:
        """One message of an attached stream, received at this time.monotonic()."""
        link = self._links[terms]
        kind = request.WhichOneof("kind")
        if kind == "step":
            if self._is_of(terms, request.step):
                self._step(link, request.step, received_at)
        elif kind == "open":
            if self._is_of(terms, request.open):
                self._open(link, request.open)
        elif kind == "close":
            if self._is_of(terms, request.close):
                self._close(link, request.close)
        else:
            self._counters.count("unexpected messages", f"{kind} behind the first message")

    def propose(self) -> None:
        """Drafts for every Step received since the last call, in one batch, and their answers."""
        asked, self._asked = self._asked, []
        if not asked:
            return
        self._asked_at = time.monotonic()
        wishes = self._wishes(asked)
        drafts: dict[int, list[int]] = {}
        if wishes:
            with self._activity("propose"):
                proposals = self._drafter.propose([wish for _, wish in wishes.values()])
            for (row, wish), proposal in zip(wishes.values(), proposals, strict=True):
                assert len(proposal.token_ids) <= wish.draft_length, (proposal, wish.draft_length)
                drafts[id(row)] = proposal.token_ids
        for step in asked:
            self._answer(step, [DraftRow(row, drafts.get(id(row), ())) for row, _ in step.rows])

    def prepare(self) -> None:
        """One bounded piece of work on what was opened or fell behind."""
        with self._activity("prefill"):
            is_idle = time.monotonic() - self._asked_at > IDLE_AFTER_SECONDS
            liar = self._table.prepare(IDLE_PIECE_SECONDS if is_idle else BUSY_PIECE_SECONDS)
        if liar is not None:
            link, session = liar
            self._counters.count("resyncs", f"slot {session.slot}: hash of its Open differs")
            replies = _replies_to(link)
            replies.resync(session.slot, session.generation, 0)
            self._reply(link, replies)

    def take_answers(self) -> list[Answer]:
        """The answers so far, in the order in which they are to be sent."""
        answers, self._answers = self._answers, []
        return answers

    def _is_of(
        self,
        terms: LinkTerms,
        message: draft_pb2.OpenBatch | draft_pb2.Step | draft_pb2.CloseBatch,
    ) -> bool:
        is_of_stream = (
            message.target_boot_id == terms.target_boot_id
            and message.stream_epoch == terms.stream_epoch
        )
        if not is_of_stream:
            self._counters.count(
                "foreign messages",
                f"target {message.target_boot_id:016x} epoch {message.stream_epoch} on the "
                f"stream of {terms.target_boot_id:016x} epoch {terms.stream_epoch}",
            )
        return is_of_stream

    def _step(self, link: LinkSessions[State], step: draft_pb2.Step, received_at: float) -> None:
        try:
            rows, is_aligned, feature_fault = decode_step(
                step,
                max_rows=link.terms.max_sequences,
                feature_row_bytes=self._feature_row_bytes,
                feature_ring=link.terms.feature_ring,
            )
        except MalformedColumn as error:
            self._counters.count("malformed messages", f"step {step.step_id}: {error}")
            rows, is_aligned, feature_fault = [], True, None
        if not is_aligned:
            self._counters.count(
                "malformed messages",
                f"step {step.step_id}: commit_counts do not add up to commit_token_ids",
            )
        if feature_fault is not None:
            self._counters.count("malformed features", f"step {step.step_id}: {feature_fault}")
        replies = _replies_to(link)
        commits = Commits(table=self._table, link=link, replies=replies, is_aligned=is_aligned)
        asking = []
        with self._activity("commit"):
            for row in rows:
                session = commits.apply(row)
                if row.draft_length:
                    asking.append((row, session))
        self._reply(link, replies)
        # Also where no row can have a draft: the target shall not wait in vain.
        if any(step.draft_lengths):
            patience = step.deadline_us * 1e-6 if step.deadline_us else float("inf")
            self._asked.append(
                _Asked(
                    link=link,
                    step_id=step.step_id,
                    received_at=received_at,
                    expires_at=received_at + patience,
                    rows=asking,
                )
            )

    def _open(self, link: LinkSessions[State], batch: draft_pb2.OpenBatch) -> None:
        replies = _replies_to(link)
        with self._activity("commit"):
            for message in batch.sequences:
                self._table.open(link, message, replies)
        self._reply(link, replies)

    def _close(self, link: LinkSessions[State], batch: draft_pb2.CloseBatch) -> None:
        try:
            slots = unpack("slots", batch.slots, SLOT)
            generations = unpack("generations", batch.generations, GENERATION, len(slots))
        except MalformedColumn as error:
            self._counters.count("malformed messages", f"close: {error}")
            return
        for slot, generation in zip(slots, generations, strict=True):
            self._table.close(link, slot, generation)

    def _wishes(
        self, asked: list[_Asked[State]]
    ) -> dict[Session[State], tuple[StepRow, Wish[State]]]:
        """The rows that get a draft: of a session the last one that asked, unless
        something behind it in the same turn closed the session or went further.
        """
        wishes = {}
        now = time.monotonic()
        for step in asked:
            if now > step.expires_at:
                self._counters.count("late steps", f"step {step.step_id}")
                continue
            for row, session in step.rows:
                if (
                    session is not None
                    and step.link.holds(session)
                    and session.length == row.base_length
                    and self._table.is_prepared(session)
                ):
                    length = draft_length_of(row, self._drafter.offer)
                    if length > 0:
                        wishes[session] = (row, Wish(session.state, length, step.expires_at))
        return wishes

    def _answer(self, step: _Asked[State], rows: list[DraftRow]) -> None:
        terms = step.link.terms
        self._answers.append(
            (
                terms,
                encode_draft(
                    draft_boot_id=self._draft_boot_id,
                    target_boot_id=terms.target_boot_id,
                    stream_epoch=terms.stream_epoch,
                    step_id=step.step_id,
                    rows=rows,
                    build_us=int((time.monotonic() - step.received_at) * 1e6),
                ),
            )
        )

    def _reply(self, link: LinkSessions[State], replies: RowReplies) -> None:
        self._answers.extend((link.terms, response) for response in replies.encode())


def _replies_to(link: LinkSessions[State]) -> RowReplies:
    return RowReplies(link.terms.target_boot_id, link.terms.stream_epoch)
