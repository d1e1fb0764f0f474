"""Client requests into batches for one target stream, and the target's steps back to each of them.

A batcher lives as long as its stream: without a stream there is none. Belongs to the event loop.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.replay import ReplayQueue
from gateway.request import GenerationRequest
from gateway.sequence import Sequence
from gateway.stalls import ProgressWatch, StalledSequence
from gateway.stats import CompletionRate, Statistics
from gateway.step import SequenceStep
from gateway.target_stream import TargetStream
from outrider.serving.errors import InvalidArgument, NotServing, Overloaded, ServiceError
from outrider.v1 import target_pb2

# A target that had no place for a sequence is asked again after so long, or after its next step
# that ends a sequence.
REJECTED_RETRY_SECONDS = 0.1


class RefusedByTarget(ServiceError):
    """The target names field, value and bound."""

    code = InvalidArgument.code


@dataclass(frozen=True, slots=True, kw_only=True)
class BatcherLimits:
    """How many sequences are where. `max_in_flight` are at the target, its queue included."""

    window_seconds: float
    max_waiting: int
    max_in_flight: int
    # How long a request may wait to be sent to the target; 0 = as long as its deadline allows.
    queue_timeout_seconds: float = 0.0
    # How long a sequence at the target may be without progress; 0 = for ever.
    stall_seconds: float = 0.0


class Batcher:
    """The waiting and the running requests of one stream."""

    def __init__(
        self,
        *,
        stream: TargetStream,
        limits: BatcherLimits,
        statistics: Statistics,
        replays: ReplayQueue,
    ) -> None:
        self._stream = stream
        self._limits = limits
        self._replays = replays
        self._statistics = statistics
        self._rate = CompletionRate()
        self._progress = ProgressWatch(limits.stall_seconds)
        self._next_id = itertools.count(1)
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}
        self._flush_timer: asyncio.Handle | None = None
        # When a waiting request has waited for too long.
        self._late_timers: dict[Sequence, asyncio.TimerHandle] = {}
        self._target_is_full = False
        self._lost: str | None = None
        self.closed = asyncio.Event()

    @property
    def waiting_count(self) -> int:
        """Requests that the target does not know yet."""
        return len(self._waiting)

    @property
    def running_count(self) -> int:
        """Sequences at the target."""
        return len(self._running)

    def stalled(self) -> list[StalledSequence]:
        """Sequences at the target that do not get on."""
        return self._progress.stalled(self._running, time.monotonic())

    def is_running(self, sequence: Sequence) -> bool:
        """It is at the target now."""
        return self._running.get(sequence.sequence_id) is sequence

    @property
    def lost_reason(self) -> str | None:
        """Why the stream ended; None while it lives."""
        return self._lost

    def submit(self, request: GenerationRequest) -> Sequence:
        """Takes a request. Raises Overloaded if the queue is full, NotServing without a stream."""
        if self._lost is not None:
            raise NotServing(f"target: {self._lost}")
        # Those that only wait for the next flush have their places already.
        queued = len(self._waiting) - self._free_places()
        if queued >= self._limits.max_waiting:
            raise Overloaded(
                f"{queued} requests wait, at most {self._limits.max_waiting} may",
                retry_after_seconds=self._rate.retry_after_seconds(queued, time.monotonic()),
            )
        sequence = Sequence(next(self._next_id), request, holder=self, is_measured=True)
        self._waiting.append(sequence)
        self._watch_the_clock(sequence)
        self._schedule_flush()
        return sequence

    def resume(self, sequences: Iterable[Sequence]) -> None:
        """Goes on with sequences that were accepted before, ahead of all that wait here."""
        resumed = list(sequences)
        for sequence in reversed(resumed):
            sequence.held_by(self, next(self._next_id))
            self._waiting.appendleft(sequence)
            self._watch_the_clock(sequence)
        if self._lost is not None:
            self._hand_over(self._lost)
        self._schedule_flush()

    def submit_first(self, request: GenerationRequest) -> Sequence:
        """Takes a request of the gateway's own: no queue, so that load cannot starve it.

        Raises NotServing.
        """
        if self._lost is not None:
            raise NotServing(f"target: {self._lost}")
        sequence = Sequence(next(self._next_id), request, holder=self, is_measured=False)
        now = time.monotonic()
        self._run(sequence, now)
        self._stream.admit([sequence.to_message(now)])
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Nobody reads the sequence any more. Harmless for one that has ended."""
        if sequence.is_ended:
            return
        sequence.is_ended = True
        if self._leave_target(sequence.sequence_id) is not None:
            self._stream.cancel([sequence.sequence_id])
            self._flush_unless_scheduled()
        else:
            self._stop_waiting(sequence)

    def stepped(
        self, steps: Iterable[tuple[int, SequenceStep]], *, has_prefill: bool = False
    ) -> None:
        """One engine step."""
        now = time.monotonic()
        self._progress.stepped(now, has_prefill=has_prefill)
        has_ended = False
        for sequence_id, step in steps:
            sequence = self._running.get(sequence_id)
            # Steps of a sequence that was cancelled a moment ago may still be on their way.
            if sequence is None:
                continue
            self._observe(sequence, len(step.token_ids), now)
            if step.token_ids:
                self._progress.emitted(sequence_id, now)
            if step.finish_reason:
                has_ended = True
                self._leave_target(sequence_id)
                self._rate.ended(now)
            sequence.push(step)
        if has_ended:
            self._target_is_full = False
            self._flush_unless_scheduled()

    def rejected(self, sequence_id: int, reason: int, message: str) -> None:
        """The target did not admit a sequence, or cannot go on with it as it is asked for."""
        sequence = self._leave_target(sequence_id)
        if sequence is None:
            return
        if reason == target_pb2.REJECT_REASON_OVERLOADED:
            # Its queue is shared with other gateways. The request keeps its place in ours.
            self._waiting.appendleft(sequence)
            self._watch_the_clock(sequence)
            self._target_is_full = True
            asyncio.get_running_loop().call_later(REJECTED_RETRY_SECONDS, self._try_again)
        elif reason == target_pb2.REJECT_REASON_INVALID:
            if sequence.losses and sequence.output_token_ids:
                # The client's request was right: another target had begun it.
                sequence.fail(NotServing(f"target: it cannot go on with the answer: {message}"))
            else:
                sequence.fail(RefusedByTarget(message))
        else:
            words = message or "it takes no new sequences"
            self._leave(sequence, words, was_running=False)
            return
        self._flush_unless_scheduled()

    def lost(self, reason: str) -> None:
        """The stream ended: the next one goes on with what it was told."""
        if self._lost is not None:
            return
        self._lost = reason
        self._hand_over(reason)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self.closed.set()

    def _run(self, sequence: Sequence, now: float) -> None:
        self._running[sequence.sequence_id] = sequence
        self._progress.admitted(sequence.sequence_id, now)

    def _leave_target(self, sequence_id: int) -> Sequence | None:
        self._progress.left(sequence_id)
        return self._running.pop(sequence_id, None)

    def _hand_over(self, reason: str) -> None:
        running, self._running = list(self._running.values()), {}
        for sequence in running:
            self._leave(sequence, reason, was_running=True)
        while self._waiting:
            sequence = self._waiting[0]
            self._stop_waiting(sequence)
            self._leave(sequence, reason, was_running=False)

    def _leave(self, sequence: Sequence, reason: str, *, was_running: bool) -> None:
        if sequence.is_measured:
            self._replays.take(sequence, reason, was_running=was_running)
        else:
            # The gateway's own are about this very stream.
            sequence.fail(NotServing(f"target lost: {reason}"))

    def _free_places(self) -> int:
        if self._target_is_full:
            return 0
        return max(self._limits.max_in_flight - len(self._running), 0)

    def _observe(self, sequence: Sequence, token_count: int, now: float) -> None:
        if token_count == 0 or not sequence.is_measured:
            return
        if sequence.last_token_at is None:
            self._statistics.time_to_first_token.observe(now - sequence.submitted_at)
        else:
            gap = (now - sequence.last_token_at) / token_count
            self._statistics.inter_token.observe(gap, times=token_count)
        sequence.last_token_at = now

    def _watch_the_clock(self, sequence: Sequence) -> None:
        """Of a sequence that waits."""
        now = time.monotonic()
        remaining = sequence.remaining_seconds(now)
        bounds = [] if remaining is None else [remaining]
        if self._limits.queue_timeout_seconds and not sequence.losses:
            bounds.append(sequence.submitted_at + self._limits.queue_timeout_seconds - now)
        if bounds:
            self._late_timers[sequence] = asyncio.get_running_loop().call_later(
                max(min(bounds), 0.0), self._is_late, sequence
            )

    def _is_late(self, sequence: Sequence) -> None:
        """A waiting sequence has waited for as long as it may."""
        queued = len(self._waiting)
        self._stop_waiting(sequence)
        now = time.monotonic()
        remaining = sequence.remaining_seconds(now)
        if remaining is not None and remaining <= 0:
            sequence.expire()
            return
        sequence.fail(
            Overloaded(
                f"not begun after {self._limits.queue_timeout_seconds:g} s in the queue "
                "(--queue-timeout)",
                retry_after_seconds=self._rate.retry_after_seconds(queued, now),
            )
        )

    def _next_waiting(self, *, has_suspect: bool) -> Sequence | None:
        """The first that may run. Suspects run one at a time, so that in the end only the one that
        is to blame has lost too many targets.
        """
        for sequence in self._waiting:
            if not (has_suspect and sequence.is_suspect):
                return sequence
        return None

    def _stop_waiting(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        timer = self._late_timers.pop(sequence, None)
        if timer is not None:
            timer.cancel()

    def _schedule_flush(self) -> None:
        """One flush for all requests of the window; without one, for all of this loop iteration."""
        if self._flush_timer is not None or not self._waiting:
            return
        loop = asyncio.get_running_loop()
        if self._limits.window_seconds > 0:
            self._flush_timer = loop.call_later(self._limits.window_seconds, self._flush)
        else:
            self._flush_timer = loop.call_soon(self._flush)

    def _flush_unless_scheduled(self) -> None:
        """A place is free; requests whose window is open go with the window's flush."""
        if self._waiting and self._flush_timer is None:
            self._flush()

    def _try_again(self) -> None:
        self._target_is_full = False
        self._schedule_flush()

    def _flush(self) -> None:
        if self._flush_timer is not None:
            self._flush_timer.cancel()
            self._flush_timer = None
        if self._lost is not None or self._target_is_full:
            return
        batch = []
        now = time.monotonic()
        has_suspect = any(sequence.is_suspect for sequence in self._running.values())
        while len(self._running) < self._limits.max_in_flight:
            sequence = self._next_waiting(has_suspect=has_suspect)
            if sequence is None:
                break
            has_suspect = has_suspect or sequence.is_suspect
            self._stop_waiting(sequence)
            self._run(sequence, now)
            batch.append(sequence.to_message(now))
        if batch:
            self._stream.admit(batch)
