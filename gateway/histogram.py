"""A histogram that is cheap to feed once per token and step. Belongs to the event loop."""

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Observations by upper bound; the last bucket has none."""

    def __init__(self, upper_bounds: Sequence[float]) -> None:
        self.upper_bounds = tuple(upper_bounds)
        self.counts = [0] * (len(upper_bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, *, times: int = 1) -> None:
        """Adds an observation so many times."""
        self.counts[bisect_left(self.upper_bounds, value)] += times
        self.sum += value * times
