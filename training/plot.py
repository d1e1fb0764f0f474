"""Draws a run's record: loss of every unrolled step, and acceptance by position, over updates."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from training.metrics import read_metrics


class PlotError(Exception):
    """A picture cannot be drawn; the text says why."""


def plot_run(metrics: Path, picture: Path) -> None:
    """Write a PNG of a metrics file; raises PlotError without matplotlib or without records."""
    if find_spec("matplotlib") is None:
        raise PlotError("the picture needs matplotlib: pip install 'outrider[train]'")
    records = read_metrics(metrics)
    training = [one for one in records if one["kind"] == "training"]
    evaluations = [one for one in records if one["kind"] == "evaluation"]
    if not training:
        raise PlotError(f"{metrics}: has no records of training")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, accepted) = pyplot.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    _plot_series(losses, training, [_numbers(one["losses"]) for one in training], "step")
    losses.set(xlabel="update", ylabel="divergence from the target (nats)", yscale="log")
    losses.set_title("Loss by unrolled step")
    if evaluations:
        series = [_per_position(one) for one in evaluations]
        _plot_series(accepted, evaluations, series, "position")
    accepted.set(xlabel="update", ylabel="share of drafts", ylim=(0, 1))
    accepted.set_title("Held-out drafts accepted up to each position")
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def _plot_series(
    axes: Any, records: Sequence[Mapping[str, object]], series: list[list[float]], name: str
) -> None:
    updates = [one["update"] for one in records]
    for index in range(len(series[0])):
        values = [one[index] for one in series]
        axes.plot(updates, values, label=f"{name} {index + 1}", linewidth=1.2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _per_position(record: Mapping[str, object]) -> list[float]:
    acceptance = record["acceptance"]
    assert isinstance(acceptance, list)
    return _numbers(acceptance[-1]["per_position"])


def _numbers(values: object) -> list[float]:
    assert isinstance(values, list)
    return [float(value) for value in values]
