"""A token bucket: so much at once, and so much a second behind it."""

import time


class TokenBucket:
    """Not thread-safe. An amount above the burst is let through when the bucket is full."""

    def __init__(self, burst: float, per_second: float) -> None:
        self._burst = burst
        self._per_second = per_second
        self._level = burst
        self._filled = time.monotonic()

    def take(self, amount: float) -> bool:
        """Takes the amount if it is there."""
        now = time.monotonic()
        self._level = min(self._burst, self._level + (now - self._filled) * self._per_second)
        self._filled = now
        if self._level < min(amount, self._burst):
            return False
        self._level -= amount
        return True
