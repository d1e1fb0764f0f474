"""When to speculate: a table from decode rows to draft length, and the words that explain it.

Pure; what learns from traffic is the controller.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider.v1 import target_pb2

EVERY_ROW_COUNT = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of a forward of so many rows."""

    rows: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPolicy:
    """`rules` are (decode rows up to which it holds, draft length), ascending; 0 beyond the last.

    `max_decode_rows` is the hard bypass; None = no bound. `reasons` say why, for people.
    """

    rules: tuple[tuple[int, int], ...]
    max_decode_rows: int | None
    reasons: tuple[str, ...]

    def to_message(self) -> target_pb2.SpeculationPolicy:
        """The policy as the target reads it."""
        return target_pb2.SpeculationPolicy(
            rules=[
                target_pb2.DraftLengthRule(max_decode_rows=rows, draft_length=draft_length)
                for rows, draft_length in self.rules
            ],
            max_decode_rows=self.max_decode_rows,
        )


def threshold_bound(speculative_disable_batch_threshold: int) -> int | None:
    """The hard bound on decode rows: 0 = never disable, so no bound at all; N = exactly N."""
    return speculative_disable_batch_threshold or None


def no_speculation(reason: str, max_decode_rows: int | None) -> SpeculationPolicy:
    """Draft length 0 at every row count."""
    return SpeculationPolicy(rules=(), max_decode_rows=max_decode_rows, reasons=(reason,))


def fixed_speculation(draft_length: int, max_decode_rows: int | None) -> SpeculationPolicy:
    """The same draft length at every row count."""
    if draft_length == 0:
        return no_speculation("the longest draft is 0 tokens", max_decode_rows)
    return SpeculationPolicy(
        rules=((EVERY_ROW_COUNT, draft_length),),
        max_decode_rows=max_decode_rows,
        reasons=(f"draft length {draft_length} at every row count",),
    )


def seconds_of(costs: Sequence[StepCost], rows: int) -> float:
    """Seconds of a forward of `rows`, from at least one measured cost, ascending in rows."""
    first, last = costs[0], costs[-1]
    if rows <= first.rows:
        return first.seconds
    for below, above in pairwise(costs):
        if rows <= above.rows:
            share = (rows - below.rows) / (above.rows - below.rows)
            return below.seconds + share * (above.seconds - below.seconds)
    before = costs[-2] if len(costs) > 1 else StepCost(rows=0, seconds=0.0)
    # Noise may make more rows look cheaper; more of them still never are.
    slope = max(last.seconds - before.seconds, 0.0) / (last.rows - before.rows)
    return last.seconds + slope * (rows - last.rows)


def rules_of(lengths: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """(rows up to which it holds, draft length), ascending, with runs of equal lengths joined; no
    rule for a last run of 0.
    """
    rules = [
        (rows, length)
        for index, (rows, length) in enumerate(lengths)
        if index + 1 == len(lengths) or lengths[index + 1][1] != length
    ]
    if rules and rules[-1][1] == 0:
        rules.pop()
    return tuple(rules)
