"""How long a step may wait for its drafts: never longer than speculation can win back."""

from collections.abc import Sequence

# Weight of the newest step in the averages; of the first ones more, so that they start right.
# Emitted tokens scatter by more than half of their mean, times by a few per cent.
TIME_SMOOTHING = 0.1
EMITTED_SMOOTHING = 0.03
# Before so many answers the break-even term is not known and left out.
MIN_ANSWERS = 8
# Longest wait beyond a plain step, whatever the averages say.
MAX_EXTRA_SECONDS = 0.040
# A draft that comes almost at once is worth this share of a plain step even where the averages,
# which are noisy, say that it wins nothing; without it, they could never be corrected.
MIN_WAIT_SHARE = 0.08
# One step in so many waits as if the averages were not known, for the same reason.
EXPLORATION_PERIOD = 8


class DraftWait:
    """Averages of step times and emitted tokens, and the wait that follows from them.

    w = min(E(k) T(0) - T(k), 2 x p95 of the draft's latency, T(0) + 40 ms): with T(0) and T(k) the
    seconds of a plain and of a verify step and E(k) the tokens emitted per decode row of a verify
    step, waiting w makes E(k) / (T(k) + w) equal to the plain 1 / T(0). Where that is over before a
    draft usually comes, waiting loses all of w, and so nothing is asked for.
    """

    def __init__(self, step_costs: Sequence[tuple[int, float]]) -> None:
        """`step_costs`: seconds of a forward by rows, ascending, as measured at boot."""
        self._step_costs = step_costs
        self._plain: dict[int, _Average] = {}
        self._verify: dict[int, _Average] = {}
        self._emitted: dict[int, _Average] = {}
        self._asks = 0

    def plain_seconds(self, decode_rows: int) -> float:
        """Seconds of a plain step, measured or as boot saw it."""
        measured = self._plain.get(decode_rows)
        return self._cost(decode_rows) if measured is None else measured.value

    def seconds(
        self, decode_rows: int, *, draft_latency_p50: float, draft_latency_p95: float
    ) -> float:
        """The longest wait for a step of so many decode rows; 0: it would most likely be in vain.

        The latencies are 0 before the first answer.
        """
        plain = self.plain_seconds(decode_rows)
        wait = plain + MAX_EXTRA_SECONDS
        if draft_latency_p95:
            wait = min(wait, 2 * draft_latency_p95)
        self._asks += 1
        verify = self._verify.get(decode_rows)
        is_known = verify is not None and verify.count >= MIN_ANSWERS
        if verify is None or not is_known or self._asks % EXPLORATION_PERIOD == 0:
            return wait
        gain = self._emitted[decode_rows].value * plain - verify.value
        worth = max(min(wait, gain), MIN_WAIT_SHARE * plain)
        return worth if worth >= draft_latency_p50 else 0.0

    def observe_plain(self, decode_rows: int, seconds: float) -> None:
        """A step without prefill that asked for no drafts."""
        self._plain.setdefault(decode_rows, _Average(TIME_SMOOTHING)).observe(seconds)

    def observe_answered(self, decode_rows: int, seconds: float, emitted_tokens: int) -> None:
        """A step without prefill whose drafts had come; `seconds` without the wait."""
        self._verify.setdefault(decode_rows, _Average(TIME_SMOOTHING)).observe(seconds)
        emitted = self._emitted.setdefault(decode_rows, _Average(EMITTED_SMOOTHING))
        emitted.observe(emitted_tokens / decode_rows)

    def _cost(self, rows: int) -> float:
        for measured_rows, seconds in self._step_costs:
            if rows <= measured_rows:
                return seconds
        measured_rows, seconds = self._step_costs[-1]
        return seconds * rows / measured_rows


class _Average:
    """The mean of the first values, then one that forgets the oldest."""

    __slots__ = ("_smoothing", "count", "value")

    def __init__(self, smoothing: float) -> None:
        self._smoothing = smoothing
        self.count = 0
        self.value = 0.0

    def observe(self, value: float) -> None:
        self.count += 1
        self.value += max(self._smoothing, 1 / self.count) * (value - self.value)
