"""What steps take, by decode rows and draft length: measured at boot, corrected by what happens.

The wait for the draft is part of a step's time, so a slow drafter is an expensive one.
"""

from bisect import bisect_left
from collections.abc import Callable

# Upper ends of the row counts that are told apart; beyond them every doubling and a half.
_FIRST_BOUNDS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# Visits of a cell that are averaged plainly, and what each counts for at least: few enough to
# follow a context that grows, enough to tell apart what differs by less than a step's noise.
PLAIN_VISITS = 8
SMOOTHING = 0.05
# Of a step's rows, in the mean of its bucket.
ROWS_SMOOTHING = 0.1
# Of what is expected: what a single step can count for. A pause is no step's cost.
LARGEST_RATIO = 3.0


def row_bounds(most: int) -> list[int]:
    """Upper ends of buckets of decode rows, ascending; the last is at least `most`."""
    bounds = list(_FIRST_BOUNDS)
    while bounds[-1] < most:
        bounds.append(bounds[-2] * 2)
    return bounds[: bisect_left(bounds, most) + 1]


class _Cell:
    """Observed over predicted, of one bucket and draft length."""

    __slots__ = ("ratio", "visits")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.visits = 0

    def observe(self, ratio: float) -> None:
        if self.visits >= PLAIN_VISITS:
            ratio = min(ratio, LARGEST_RATIO * self.ratio)
        self.visits += 1
        share = max(1.0 / self.visits, SMOOTHING)
        self.ratio += share * (ratio - self.ratio)


class StepTimes:
    """Predictions. Owned by one thread."""

    def __init__(
        self, predicted: Callable[[int, int], float], bounds: list[int], max_draft_length: int
    ) -> None:
        """`predicted(rows, draft_length)`: seconds of a step, as far as is known at boot."""
        self._predicted = predicted
        self._bounds = bounds
        # Rows of the steps that fall into each bucket, in the mean of late.
        self._rows = [float(bound) for bound in bounds]
        self._is_used = [False] * len(bounds)
        self._cells = [[_Cell() for _ in range(max_draft_length + 1)] for _ in bounds]

    def bucket(self, rows: int) -> int:
        """The index of the bucket of a row count; the last one beyond all."""
        return min(bisect_left(self._bounds, rows), len(self._bounds) - 1)

    def observe(self, rows: int, draft_length: int, seconds: float) -> None:
        """A step without prefill that took so long."""
        bucket = self.bucket(rows)
        share = ROWS_SMOOTHING if self._is_used[bucket] else 1.0
        self._rows[bucket] += share * (rows - self._rows[bucket])
        self._is_used[bucket] = True
        cell = self._cells[bucket][draft_length]
        cell.observe(seconds / self._predicted(rows, draft_length))

    def visits(self, bucket: int, draft_length: int) -> int:
        """Steps seen of a cell."""
        return self._cells[bucket][draft_length].visits

    def rows(self, bucket: int) -> int:
        """Decode rows of a usual step there; before there was one, the most."""
        return round(self._rows[bucket])

    def seconds(self, bucket: int, draft_length: int) -> float:
        """Of a step with so many rows."""
        return self._predicted(self.rows(bucket), draft_length) * self._ratio(bucket, draft_length)

    def _ratio(self, bucket: int, draft_length: int) -> float:
        """The cell's own; before it was seen that of its bucket's plain steps times what drafts of
        this length, or else of any, cost above them in the nearest bucket where both were seen.
        """
        own = self._cells[bucket][draft_length]
        if own.visits:
            return own.ratio
        plain = self._plain_ratio(bucket)
        if draft_length == 0:
            return plain
        for near in sorted(range(len(self._cells)), key=lambda other: abs(other - bucket)):
            cells = self._cells[near]
            lengths = sorted(
                (length for length in range(1, len(cells)) if cells[length].visits),
                key=lambda length: abs(length - draft_length),
            )
            if lengths:
                return plain * cells[lengths[0]].ratio / self._plain_ratio(near)
        return plain

    def _plain_ratio(self, bucket: int) -> float:
        seen = [index for index, cells in enumerate(self._cells) if cells[0].visits]
        if not seen:
            return 1.0
        nearest = min(seen, key=lambda other: abs(other - bucket))
        return self._cells[nearest][0].ratio
