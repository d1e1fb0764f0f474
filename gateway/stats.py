"""What the gateway itself counts. Belongs to the event loop."""

from collections import Counter, deque

from gateway.histogram import Histogram

FIRST_TOKEN_BOUNDS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
INTER_TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 5.0,
)  # fmt: skip
RATE_WINDOW_SECONDS = 30.0
LONGEST_RETRY_AFTER_SECONDS = 60.0


class Statistics:
    """Latencies and requests by outcome: stop, length, cancelled, deadline, error, rejected."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS)
        self.requests: Counter[str] = Counter()


class CompletionRate:
    """How fast requests end: what Retry-After is worked out from."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque(maxlen=256)

    def ended(self, now: float) -> None:
        """One request has left the target."""
        self._ended_at.append(now)

    def retry_after_seconds(self, waiting: int, now: float) -> float:
        """Seconds in which so many requests end, at the rate of the last half minute."""
        while self._ended_at and now - self._ended_at[0] > RATE_WINDOW_SECONDS:
            self._ended_at.popleft()
        if not self._ended_at:
            return 1.0
        span = max(now - self._ended_at[0], 0.1)
        seconds = waiting * span / len(self._ended_at)
        return min(max(seconds, 1.0), LONGEST_RETRY_AFTER_SECONDS)
