"""How near a server that chooses its draft lengths comes to the best choice that stays the same."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.bench.load import Load
from outrider.bench.measure import Measured

AUTO = "auto"
# Two-sided 95 % quantiles of Student's t by degrees of freedom, 1 to 10; beyond, the normal's.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
NORMAL_QUANTILE = 1.96


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`auto` beside the best of the others, at one load."""

    load: Load
    best: str  # of all repetitions together
    ratio: float  # mean over the repetitions of auto's rate to the best's
    half_width: float | None  # of its 95 % interval; None with one repetition

    def words(self) -> str:
        """One line."""
        interval = "" if self.half_width is None else f" +- {self.half_width:.3f} (95 %)"
        return f"{self.load.words()}: auto is {self.ratio:.3f}{interval} of {self.best}"


def compare(measured: Sequence[Measured]) -> list[Comparison]:
    """One for each load with `auto` and another mode. In each repetition `auto` is compared with
    the mode that was best in all the others: chosen on the same run, the luckiest would win.
    """
    rates: dict[Load, dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in measured:
        rates[one.load][one.repetition][one.name] = one.figures.output_tokens_per_second
    comparisons = []
    for load, by_repetition in rates.items():
        ratios = []
        for repetition, by_mode in by_repetition.items():
            others = [rate for other, rate in by_repetition.items() if other != repetition] or [
                by_mode
            ]
            best = _best(others)
            if best in by_mode and AUTO in by_mode:
                ratios.append(by_mode[AUTO] / by_mode[best])
        overall = _best(list(by_repetition.values()))
        if ratios and overall:
            comparisons.append(
                Comparison(
                    load=load,
                    best=overall,
                    ratio=statistics.fmean(ratios),
                    half_width=_half_width(ratios),
                )
            )
    return comparisons


def _best(repetitions: Sequence[Mapping[str, float]]) -> str:
    """The mode of the largest median, `auto` aside; empty without one."""
    by_mode: dict[str, list[float]] = defaultdict(list)
    for rates in repetitions:
        for name, rate in rates.items():
            if name != AUTO:
                by_mode[name].append(rate)
    return max(by_mode, key=lambda name: statistics.median(by_mode[name]), default="")


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    freedom = len(values) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NORMAL_QUANTILE
    return quantile * statistics.stdev(values) / math.sqrt(len(values))
