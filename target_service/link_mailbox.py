"""Between the link's event loop and the engine's thread: what was asked, what came, the circuit.

Thread-safe. Knows messages and their times, not streams and not sequences.
"""

import math
import threading
import time
from collections import deque
from dataclasses import dataclass

from outrider.v1 import draft_pb2
from target_service.circuit_breaker import Circuit, CircuitBreaker
from target_service.codec import NOT_ASKED
from target_service.link_features import LinkFeatures
from target_service.statistics import Statistics

# Resyncs and refusals that the engine has not taken; beyond it the oldest are forgotten.
MAX_UNTAKEN = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """What the engine needs to know before it asks. `stream_epoch` is 0 without a stream."""

    stream_epoch: int
    draft_boot_id: int
    max_draft_length: int
    max_sequence_length: int
    features: LinkFeatures | None = None  # None: the drafter needs none


NO_LINK = LinkView(stream_epoch=0, draft_boot_id=0, max_draft_length=0, max_sequence_length=0)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A Step that is not answered yet. Times are time.monotonic seconds."""

    sent: float
    late_after_seconds: float


class LinkMailbox:
    """One link's. Only the latest stream counts: what an older one left is dropped."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._condition = threading.Condition()
        self._breaker = CircuitBreaker()
        self._breaker_boot_id = 0
        self._view = NO_LINK
        self._received: deque[draft_pb2.LinkResponse] = deque(maxlen=MAX_UNTAKEN)
        self._asked: dict[int, _Asked] = {}
        self._answered_step_id = 0

    # For the engine's thread.

    def view(self) -> LinkView:
        """The stream now."""
        return self._view

    def circuit(self) -> tuple[Circuit, str]:
        """Whether drafts may be asked for, and why not."""
        with self._condition:
            return self._breaker.state(time.monotonic()), self._breaker.reason

    def asked(self, step_id: int, late_after_seconds: float) -> None:
        """Notes that a Step is sent; an answer that takes longer speaks against the link."""
        now = time.monotonic()
        with self._condition:
            for earlier, asked in list(self._asked.items()):
                if now - asked.sent > asked.late_after_seconds:
                    self._asked.pop(earlier, None)
                    self._late(now)
            # What is asked through an open circuit (by canaries) is no trial.
            is_open = self._breaker.state(now) == Circuit.OPEN
            self._asked[step_id] = _Asked(now, math.inf if is_open else late_after_seconds)

    def judge_row(self, *, is_usable: bool) -> None:
        """Tells the circuit breaker about a draft row."""
        with self._condition:
            self._breaker.row(is_usable=is_usable, now=time.monotonic())

    def wait_for(self, step_id: int, stream_epoch: int, timeout_seconds: float) -> bool:
        """Waits until a Step of a stream is answered or the stream is gone; was it answered?"""
        with self._condition:
            self._condition.wait_for(
                lambda: (
                    self._answered_step_id >= step_id or self._view.stream_epoch != stream_epoch
                ),
                timeout=timeout_seconds,
            )
            return self._answered_step_id >= step_id

    def take_received(self) -> list[draft_pb2.LinkResponse]:
        """Drafts, resyncs and refusals since the last call."""
        with self._condition:
            taken = list(self._received)
            self._received.clear()
        return taken

    # For the event loop.

    def open_stream(self, view: LinkView) -> None:
        """A stream has shaken hands. Another draft process starts with a clean slate."""
        with self._condition:
            if view.draft_boot_id != self._breaker_boot_id:
                self._breaker = CircuitBreaker()
                self._breaker_boot_id = view.draft_boot_id
            self._view = view

    def close_stream(self, *, fell_silent: bool) -> None:
        """The stream is gone. One that fell silent is tried with care when it is back."""
        with self._condition:
            self._view = NO_LINK
            self._asked.clear()
            self._received.clear()
            if fell_silent:
                self._breaker.trip(time.monotonic(), "it had fallen silent")
            self._condition.notify_all()

    def deliver(self, response: draft_pb2.LinkResponse) -> None:
        """A Draft, Resync or Refuse. A Draft that nobody asked for, or twice, is dropped unread."""
        now = time.monotonic()
        with self._condition:
            if response.HasField("draft"):
                asked = self._asked.pop(response.draft.step_id, None)
                if asked is None:
                    self._statistics.draft_rows_dropped[NOT_ASKED] += 1
                    return
                seconds = now - asked.sent
                self._statistics.link_round_trip.observe(seconds)
                self._statistics.draft_build_seconds += response.draft.build_us * 1e-6
                if seconds <= asked.late_after_seconds:
                    self._breaker.timely(now)
                else:
                    self._late(now)
                self._answered_step_id = max(self._answered_step_id, response.draft.step_id)
            self._received.append(response)
            self._condition.notify_all()

    def _late(self, now: float) -> None:
        self._breaker.late(now)
        if self._breaker.state(now) == Circuit.OPEN:
            # What is still unanswered must not count against the trial that comes.
            self._asked.clear()
