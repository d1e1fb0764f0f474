"""A benchmark's curves: rate and latency over load, a line a server or mode."""

import statistics
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from outrider.bench.envelope import AUTO
from outrider.bench.figures import Figures
from outrider.bench.load import Load
from outrider.bench.measure import Measured
from outrider.bench.report import grouped


class PlotError(Exception):
    """A picture cannot be drawn; the text says why."""


def require_plots() -> None:
    """Raises PlotError where nothing can draw, before anything is measured."""
    if find_spec("matplotlib") is None:
        raise PlotError("--plot needs matplotlib: pip install 'outrider[train]'")


def plot(measured: Sequence[Measured], picture: Path, title: str) -> None:
    """Writes a PNG. Bars from the slowest repetition to the fastest; above them, dashed, the best
    of all modes but `auto` at every load, where there are several.
    """
    require_plots()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[tuple[Load, list[Figures]]]] = {}
    for (name, load), figures in grouped(measured).items():
        lines.setdefault(name, []).append((load, figures))
    figure, (rates, times) = pyplot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for name, points in lines.items():
        points.sort(key=lambda point: point[0].size)
        sizes = [load.size for load, _ in points]
        all_rates = [[one.output_tokens_per_second for one in figures] for _, figures in points]
        middles = [statistics.median(one) for one in all_rates]
        spread = [
            [middle - min(one) for middle, one in zip(middles, all_rates, strict=True)],
            [max(one) - middle for middle, one in zip(middles, all_rates, strict=True)],
        ]
        style = {"linewidth": 2.5, "color": "black"} if name == AUTO else {"linewidth": 1.5}
        rates.errorbar(sizes, middles, yerr=spread, label=name, marker="o", capsize=3, **style)
        known = [
            (load.size, statistics.median(values))
            for load, figures in points
            if (values := [
                1000 * one.inter_token_seconds.p50
                for one in figures
                if one.inter_token_seconds is not None
            ])
        ]  # fmt: skip
        if known:
            times.plot(*zip(*known, strict=True), label=name, marker="o", **style)
    if len(lines) > 2 and AUTO in lines:
        best: dict[float, float] = {}
        for name, points in lines.items():
            for load, figures in points if name != AUTO else ():
                middle = statistics.median(one.output_tokens_per_second for one in figures)
                best[load.size] = max(best.get(load.size, 0.0), middle)
        sizes = sorted(best)
        rates.plot(sizes, [best[size] for size in sizes], "--", color="grey", label="best of these")
    is_open = any(one.load.rate for one in measured)
    label = "requests a second" if is_open else "requests at once"
    rates.set(xlabel=label, ylabel="output tokens a second", xscale="log")
    times.set(xlabel=label, ylabel="time between tokens, median (ms)", xscale="log")
    for axes in (rates, times):
        axes.set_ylim(bottom=0)
        ticks = sorted({one.load.size for one in measured})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)
