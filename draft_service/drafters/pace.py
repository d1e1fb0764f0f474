"""How much work a drafter with a model does at a time."""

from collections.abc import Sequence

# Fewest rows of one piece of prefill, whatever they cost.
MIN_PREFILL_ROWS = 8
# What an answer needs on its way.
ANSWER_SECONDS = 0.001
# Committed tokens that are run together with a proposal's first forward.
MAX_BACKLOG = 16


def rows_within(
    seconds: float, step_seconds: Sequence[tuple[int, float]], max_step_rows: int
) -> int:
    """Rows of a forward of about so many seconds, by what boot measured: (rows, seconds),
    ascending.
    """
    rows = max((rows for rows, cost in step_seconds if cost <= seconds), default=MIN_PREFILL_ROWS)
    most_rows, most_seconds = step_seconds[-1]
    if rows == most_rows:
        # Beyond what was measured the cost grows with the rows.
        rows = int(most_rows * seconds / most_seconds)
    return min(max(rows, MIN_PREFILL_ROWS), max_step_rows)
