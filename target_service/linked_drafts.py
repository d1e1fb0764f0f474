"""Drafts over the link: what is asked for, how long it is waited for, what of it is used.

Nothing that comes back is trusted: a row is used only if its stamps are those of the live sequence.
"""

import time
from collections.abc import Callable, Mapping, Sequence

from outrider.engine.feature_tap import Tap
from outrider.serving.columns import MalformedColumn
from outrider.v1 import draft_pb2
from target_service import codec, policy
from target_service.circuit_breaker import Circuit
from target_service.codec import (
    DraftRow,
    StepRow,
    decode_draft,
    decode_rows,
    encode_step,
    split_steps,
)
from target_service.draft_wait import MAX_EXTRA_SECONDS, DraftWait
from target_service.drafts import NOTHING_COLLECTED, Collected
from target_service.link_mailbox import LinkMailbox
from target_service.sequence import Sequence as TokenSequence
from target_service.slots import SlotTable
from target_service.statistics import Statistics
from target_service.told import Told

# Of the wait, what the draft service may use; the rest is the way there and back.
DRAFTING_SHARE = 0.9
# How often a patient wait looks whether anybody else wants something.
PATIENT_SLICE_SECONDS = 0.02

# Round trips whose median says when the next draft will be there.
NUM_RECENT_ROUND_TRIPS = 16

# More unsent messages than this, and features that can wait do.
CONGESTED_MESSAGES = 8

# Queues messages for the stream of an epoch; they are dropped if it is gone by then.
Send = Callable[[int, Sequence[draft_pb2.LinkRequest]], None]


class LinkedDrafts:
    """The DraftSource behind a DraftLink. Owned by the engine's thread."""

    def __init__(
        self,
        *,
        mailbox: LinkMailbox,
        send: Send,
        num_unsent: Callable[[], int],
        target_boot_id: int,
        num_slots: int,
        vocab_size: int,
        wait: DraftWait,
        statistics: Statistics,
    ) -> None:
        self._mailbox = mailbox
        self._send = send
        self._num_unsent = num_unsent
        self._num_slots = num_slots
        self._target_boot_id = target_boot_id
        self._vocab_size = vocab_size
        self._wait = wait
        self._statistics = statistics
        self._slots = SlotTable(num_slots)
        self._told = Told(target_boot_id, self._slots)
        self._view = mailbox.view()
        # Stays while the link is down: the features of what runs are there when it is back.
        self._tap: Tap | None = None
        self._step_id = 0
        # The Step that asked for the drafts to come.
        self._asked_step_id = 0
        # What was asked for last, by the sequence's arrival.
        self._asked_lengths: dict[int, int] = {}
        # When the wait for it is over, in time.perf_counter seconds.
        self._wait_until = 0.0
        self._is_patient = False

    def unavailable(self, *, patience_seconds: float) -> str | None:
        self._follow_stream()
        if not self._view.stream_epoch:
            return policy.LINK_DOWN
        if self._circuit() == Circuit.OPEN and not patience_seconds:
            return policy.CIRCUIT_OPEN
        return None

    def started(self, sequences: Sequence[TokenSequence]) -> None:
        for sequence in sequences:
            self._slots.take(sequence)
            if sequence.request.draft_length_override != 0:
                self._told.started(sequence)

    def stopped(self, sequence: TokenSequence) -> None:
        self._told.stopped(sequence, self._slots.give_back(sequence))
        self._asked_lengths.pop(sequence.arrival, None)

    def ask(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Mapping[int, int],
        *,
        decode_rows: int,
        patience_seconds: float,
    ) -> bool:
        self._follow_stream()
        self._asked_lengths.clear()
        view = self._view
        if not view.stream_epoch or not view.max_draft_length:
            return False
        wait = patience_seconds or self._wait_seconds(decode_rows)
        messages = self._told.held_back(view)
        wanted = []
        if wait is not None:
            wanted = [sequence for sequence in sequences if self._told.may_ask(sequence, view)]
        lengths = [
            min(draft_lengths[sequence.arrival], view.max_draft_length) for sequence in wanted
        ]
        news = self._told.catch_up(wanted, lengths, view, is_congested=self._is_congested())
        messages.extend(news.opens)
        if news.rows:
            assert wait is not None
            self._asked_lengths = {
                sequence.arrival: row.draft_length
                for sequence, row in zip(news.asked, news.rows, strict=True)
            }
            late_after = max(self._wait.plain_seconds(decode_rows) + MAX_EXTRA_SECONDS, wait)
            deadline_us = int((wait or late_after) * DRAFTING_SHARE * 1e6)
            messages.extend(self._steps(news.rows, deadline_us))
            self._asked_step_id = self._step_id
            self._wait_until = time.perf_counter() + wait
            self._is_patient = patience_seconds > 0
            self._mailbox.asked(self._asked_step_id, late_after)
        # Behind what is asked for, which must not wait for them.
        messages.extend(self._steps(news.feeding_rows, 0))
        if messages:
            self._send(view.stream_epoch, messages)
        return bool(news.rows)

    def tap(self) -> Tap | None:
        self._follow_stream()
        return self._tap

    def collect(
        self, sequences: Sequence[TokenSequence], *, has_news: Callable[[], bool]
    ) -> Collected:
        if not self._asked_lengths:
            return NOTHING_COLLECTED
        started = time.perf_counter()
        is_answered = self._wait_for_answer(has_news)
        self._follow_stream()
        drafts: dict[int, tuple[int, ...]] = {}
        live = {sequence.arrival for sequence in sequences}
        for response in self._mailbox.take_received():
            self._take(response, live, drafts)
        if not is_answered:
            missing = len(self._asked_lengths.keys() & live)
            self._statistics.draft_rows_dropped[codec.LATE] += missing
        self._asked_lengths.clear()
        return Collected(
            drafts=drafts,
            waited_seconds=time.perf_counter() - started,
            is_answered=is_answered,
        )

    def flush(self, *, is_bypassed: bool) -> None:
        if is_bypassed:
            # What was asked for before the bypass is of no use behind it.
            self._asked_lengths.clear()
            return
        self._follow_stream()
        view = self._view
        if not view.stream_epoch:
            return
        messages = self._told.held_back(view)
        if view.features is not None and self._circuit() != Circuit.OPEN:
            news = self._told.catch_up((), (), view, is_congested=self._is_congested())
            messages.extend(self._steps(news.feeding_rows, 0))
        if messages:
            self._send(view.stream_epoch, messages)

    def observe(
        self,
        *,
        collected: Collected,
        decode_rows: int,
        seconds: float,
        emitted_tokens: int,
        is_pure: bool,
    ) -> None:
        if not is_pure or not decode_rows:
            return
        if collected.is_answered:
            self._wait.observe_answered(decode_rows, seconds, emitted_tokens)
        if not collected.drafts:
            self._wait.observe_plain(decode_rows, seconds)

    def _wait_seconds(self, decode_rows: int) -> float | None:
        """How long the next step may wait for its drafts, from now; None: it shall ask for none."""
        if self._circuit() != Circuit.CLOSED:
            # On trial: a draft that is there in time is welcome, none is waited for.
            return 0.0
        round_trip = self._statistics.link_round_trip
        seconds = self._wait.seconds(
            decode_rows,
            draft_latency_p50=round_trip.quantile(0.5, latest=NUM_RECENT_ROUND_TRIPS),
            draft_latency_p95=round_trip.quantile(0.95),
        )
        return seconds or None

    def _wait_for_answer(self, has_news: Callable[[], bool]) -> bool:
        epoch = self._view.stream_epoch
        while True:
            left = max(self._wait_until - time.perf_counter(), 0.0)
            # A patient wait ends as soon as anybody else wants something.
            slice_seconds = min(left, PATIENT_SLICE_SECONDS) if self._is_patient else left
            if self._mailbox.wait_for(self._asked_step_id, epoch, slice_seconds):
                return True
            is_over = left <= slice_seconds or has_news()
            if is_over or self._mailbox.view().stream_epoch != epoch:
                return False

    def _circuit(self) -> Circuit:
        circuit, _ = self._mailbox.circuit()
        return circuit

    def _follow_stream(self) -> None:
        view = self._mailbox.view()
        if view.stream_epoch == self._view.stream_epoch:
            return
        if self._view.features is not None:
            self._view.features.close()
        self._view = view
        if view.stream_epoch:
            self._tap = None if view.features is None else view.features.tap
        self._told.start_stream(view)
        self._asked_lengths.clear()

    def _is_congested(self) -> bool:
        return self._num_unsent() > CONGESTED_MESSAGES

    def _steps(self, rows: Sequence[StepRow], deadline_us: int) -> list[draft_pb2.LinkRequest]:
        """The rows as one message, or as many as their features need; the last one asks."""
        if not rows:
            return []
        features = self._view.features
        ring = None if features is None else features.ring
        parts = [rows] if features is None else split_steps(rows, features.rows_per_message)
        messages = []
        for part in parts:
            self._step_id += 1
            step = encode_step(
                target_boot_id=self._target_boot_id,
                stream_epoch=self._view.stream_epoch,
                step_id=self._step_id,
                deadline_us=deadline_us,
                rows=part,
                ring=ring,
            )
            messages.append(draft_pb2.LinkRequest(step=step))
            self._statistics.step_message_bytes += step.ByteSize()
            if features is not None:
                count = sum(len(row.features.rows) for row in part if row.features is not None)
                self._statistics.count_features(
                    transport=features.transport, rows=count, size=count * features.row_bytes
                )
        return messages

    def _take(
        self,
        response: draft_pb2.LinkResponse,
        live: set[int],
        drafts: dict[int, tuple[int, ...]],
    ) -> None:
        """One message. A malformed one is counted and dropped; it never ends the stream."""
        try:
            if response.HasField("draft"):
                if self._is_of_this_stream(response.draft):
                    for row in decode_draft(response.draft, self._num_slots):
                        self._take_row(row, live, drafts)
                else:
                    self._drop(codec.EPOCH)
            elif response.HasField("resync"):
                for sequence in self._named(decode_rows(response.resync, self._num_slots)):
                    self._told.forgot(sequence)
            elif response.HasField("refuse"):
                for sequence in self._named(decode_rows(response.refuse, self._num_slots)):
                    self._told.refuse(sequence)
                    self._drop(codec.REFUSED)
        except MalformedColumn:
            self._drop_unusable(codec.MALFORMED)

    def _is_of_this_stream(self, draft: draft_pb2.Draft) -> bool:
        return (
            draft.target_boot_id == self._target_boot_id
            and draft.stream_epoch == self._view.stream_epoch
            and draft.draft_boot_id == self._view.draft_boot_id
        )

    def _take_row(self, row: DraftRow, live: set[int], drafts: dict[int, tuple[int, ...]]) -> None:
        sequence = self._slots.holder(row.stamp.slot)
        if not all(0 <= token_id < self._vocab_size for token_id in row.token_ids):
            self._drop_unusable(codec.TOKEN_RANGE)
        elif sequence is None:
            self._drop(codec.SLOT_FREE)
        elif row.stamp.generation != self._slots.generation(row.stamp.slot):
            self._drop(codec.OTHER_GENERATION)
        elif row.stamp.base_length != sequence.committed_length:
            self._drop(codec.OTHER_BASE_LENGTH)
        elif row.stamp.prefix_hash != sequence.prefix_hash:
            self._drop_unusable(codec.OTHER_PREFIX_HASH)
        elif sequence.arrival not in live or sequence.arrival not in self._asked_lengths:
            self._drop(codec.NOT_ASKED)
        elif len(row.token_ids) > self._asked_lengths[sequence.arrival]:
            self._drop_unusable(codec.TOO_LONG)
        elif row.token_ids:
            self._mailbox.judge_row(is_usable=True)
            drafts[sequence.arrival] = row.token_ids

    def _named(self, rows: Sequence[tuple[int, int]]) -> list[TokenSequence]:
        named = []
        for slot, generation in rows:
            sequence = self._slots.holder(slot)
            if sequence is not None and generation == self._slots.generation(slot):
                named.append(sequence)
        return named

    def _drop(self, reason: str) -> None:
        """A row that came too late, or for a sequence that is not there any more."""
        self._statistics.draft_rows_dropped[reason] += 1

    def _drop_unusable(self, reason: str) -> None:
        """A row that no state of the target would have made right."""
        self._drop(reason)
        self._mailbox.judge_row(is_usable=False)
