"""Decides whether drafts are asked for: closed (yes), open (no), half-open (on trial, without
waiting for them).
"""

import enum
from collections import deque

MAX_CONSECUTIVE_LATE = 3
# Unusable rows among the latest, above which the circuit opens.
USABLE_WINDOW = 64
MAX_UNUSABLE_SHARE = 0.2
FIRST_PAUSE_SECONDS = 0.5
MAX_PAUSE_SECONDS = 30.0
TIMELY_TO_CLOSE = 4


class Circuit(enum.Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """One link's circuit. Times are time.monotonic seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._state = Circuit.CLOSED
        self.reason = ""
        self._num_late = 0
        self._num_timely = 0
        self._usable: deque[bool] = deque(maxlen=USABLE_WINDOW)
        self._pause = FIRST_PAUSE_SECONDS
        self._open_until = 0.0

    def state(self, now: float) -> Circuit:
        """The state; an open circuit becomes half-open when its pause is over."""
        if self._state == Circuit.OPEN and now >= self._open_until:
            self._state = Circuit.HALF_OPEN
            self._num_timely = 0
            self._num_late = 0
        return self._state

    def timely(self, now: float) -> None:
        """An answer came in time."""
        self._num_late = 0
        if self.state(now) == Circuit.HALF_OPEN:
            self._num_timely += 1
            if self._num_timely >= TIMELY_TO_CLOSE:
                self._state = Circuit.CLOSED
                self.reason = ""
                self._pause = FIRST_PAUSE_SECONDS
                self._usable.clear()

    def late(self, now: float) -> None:
        """An answer came too late to be of use, or not at all."""
        self._num_late += 1
        state = self.state(now)
        if state == Circuit.HALF_OPEN:
            self._open(now, "a draft on trial was late")
        elif state == Circuit.CLOSED and self._num_late >= MAX_CONSECUTIVE_LATE:
            self._open(now, f"{self._num_late} drafts in a row were late")

    def trip(self, now: float, reason: str) -> None:
        """Opens the circuit for a reason seen elsewhere."""
        self._open(now, reason)

    def row(self, *, is_usable: bool, now: float) -> None:
        """A draft row was usable, or malformed."""
        self._usable.append(is_usable)
        unusable = self._usable.count(False)
        if (
            self._state == Circuit.CLOSED
            and len(self._usable) == USABLE_WINDOW
            and unusable > MAX_UNUSABLE_SHARE * USABLE_WINDOW
        ):
            self._usable.clear()
            self._open(now, f"{unusable} of {USABLE_WINDOW} draft rows were unusable")

    def _open(self, now: float, reason: str) -> None:
        self._state = Circuit.OPEN
        self.reason = reason
        self._num_late = 0
        self._open_until = now + self._pause
        self._pause = min(2 * self._pause, MAX_PAUSE_SECONDS)
