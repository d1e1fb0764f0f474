"""How long a step may wait for its drafts: never longer than speculation can win back."""

from collections.abc import Sequence

SMOOTHING = 0.1
# Before so many answers the break-even term is not known and left out.
MIN_ANSWERS = 8
# Longest wait beyond a plain step, whatever the averages say.
MAX_EXTRA_SECONDS = 0.040
# A draft that comes almost at once is worth this share of a plain step even where the averages,
# which are noisy, say that it wins nothing; without it, they could never be corrected.
MIN_WAIT_SHARE = 0.08
# One step in so many waits as if the averages were not known, for the same reason.
EXPLORATION_PERIOD = 32


class DraftWait:
    """Averages of step times and emitted tokens, and the wait that follows from them.

    w = min(E(k) T(0) - T(k), 2 x p95 of the draft's latency, T(0) + 40 ms): with T(0) and T(k) the
    seconds of a plain and of a verify step and E(k) the tokens emitted per decode row of a verify
    step, waiting w makes E(k) / (T(k) + w) equal to the plain 1 / T(0).
    """

    def __init__(self, step_costs: Sequence[tuple[int, float]]) -> None:
        """`step_costs`: seconds of a forward by rows, ascending, as measured at boot."""
        self._step_costs = step_costs
        self._plain: dict[int, float] = {}
        self._verify: dict[int, float] = {}
        self._emitted: dict[int, float] = {}
        self._answers: dict[int, int] = {}
        self._asks = 0

    def plain_seconds(self, decode_rows: int) -> float:
        """Seconds of a plain step, measured or as boot saw it."""
        return self._plain.get(decode_rows) or self._cost(decode_rows)

    def seconds(self, decode_rows: int, draft_latency_p95: float) -> float:
        """The longest wait for a step of so many decode rows."""
        plain = self.plain_seconds(decode_rows)
        wait = plain + MAX_EXTRA_SECONDS
        if draft_latency_p95:
            wait = min(wait, 2 * draft_latency_p95)
        self._asks += 1
        is_known = self._answers.get(decode_rows, 0) >= MIN_ANSWERS
        if not is_known or self._asks % EXPLORATION_PERIOD == 0:
            return wait
        gain = self._emitted[decode_rows] * plain - self._verify[decode_rows]
        return max(min(wait, gain), MIN_WAIT_SHARE * plain)

    def observe_plain(self, decode_rows: int, seconds: float) -> None:
        """A step without prefill that asked for no drafts."""
        self._plain[decode_rows] = _smoothed(self._plain.get(decode_rows), seconds)

    def observe_answered(self, decode_rows: int, seconds: float, emitted_tokens: int) -> None:
        """A step without prefill whose drafts had come; `seconds` without the wait."""
        emitted = emitted_tokens / decode_rows
        self._answers[decode_rows] = self._answers.get(decode_rows, 0) + 1
        self._verify[decode_rows] = _smoothed(self._verify.get(decode_rows), seconds)
        self._emitted[decode_rows] = _smoothed(self._emitted.get(decode_rows), emitted)

    def _cost(self, rows: int) -> float:
        for measured_rows, seconds in self._step_costs:
            if rows <= measured_rows:
                return seconds
        measured_rows, seconds = self._step_costs[-1]
        return seconds * rows / measured_rows


def _smoothed(average: float | None, value: float) -> float:
    return value if average is None else average + SMOOTHING * (value - average)
