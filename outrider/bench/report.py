"""A benchmark's runs as a table and as JSON."""

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from outrider.bench.envelope import Comparison
from outrider.bench.figures import Figures, Percentiles
from outrider.bench.load import Load
from outrider.bench.measure import Measured

# Beyond this share of its time on a processor, the client may be what was measured.
BUSY_CLIENT = 0.9
WIDE = 200


def print_report(
    measured: Sequence[Measured], conclusions: Sequence[str], warnings: Sequence[str]
) -> None:
    """The table and a line for each conclusion; warnings to standard error."""
    # Where nobody looks, a line is as long as it has to be.
    console = Console() if sys.stdout.isatty() else Console(width=WIDE)
    console.print(table_of(measured))
    for line in conclusions:
        console.print(line, highlight=False)
    for line in warnings:
        Console(stderr=True).print(f"outrider bench: {line}", style="yellow", highlight=False)


def grouped(measured: Sequence[Measured]) -> dict[tuple[str, Load], list[Figures]]:
    """The repetitions of each mode and load, in the order in which they first came."""
    groups: dict[tuple[str, Load], list[Figures]] = {}
    for one in measured:
        groups.setdefault((one.name, one.load), []).append(one.figures)
    return groups


def table_of(measured: Sequence[Measured]) -> Table:
    """A row for each mode and load: medians of the repetitions, of the rate its range too."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("server", "load", "requests", "tokens/s", "requests/s"):
        table.add_column(column, justify="left" if column in ("server", "load") else "right")
    for column in ("first token ms", "token ms", "request s"):
        table.add_column(f"{column}\np50 / p90 / p99", justify="right")
    for column in ("acceptance\nlength", "without\ndrafts", "errors"):
        table.add_column(column, justify="right")
    for (name, load), figures in grouped(measured).items():
        rates = [one.output_tokens_per_second for one in figures]
        spread = f" ({min(rates):.4g} to {max(rates):.4g})" if len(rates) > 1 else ""
        table.add_row(
            name,
            load.words(),
            str(sum(one.requests for one in figures)),
            f"{statistics.median(rates):.4g}{spread}",
            f"{statistics.median(one.requests_per_second for one in figures):.3g}",
            _percentiles(figures, lambda one: one.first_token_seconds, 1000),
            _percentiles(figures, lambda one: one.inter_token_seconds, 1000),
            _percentiles(figures, lambda one: one.request_seconds, 1),
            _median(figures, lambda one: one.acceptance_length, ".2f"),
            _median(figures, lambda one: one.bypass_share, ".0%"),
            str(sum(one.errors for one in figures)),
        )
    return table


def warnings_of(measured: Sequence[Measured]) -> list[str]:
    """What makes figures doubtful."""
    lines = []
    for (name, load), figures in grouped(measured).items():
        failed = [one for one in figures if one.errors]
        if failed:
            lines.append(
                f"{name}, {load.words()}: {sum(one.errors for one in failed)} requests failed, the "
                f"first: {failed[0].first_error}"
            )
        share = max(one.client_share for one in figures)
        if share > BUSY_CLIENT:
            lines.append(
                f"{name}, {load.words()}: this client computed {share:.0%} of the time and may be "
                "what limits the rate"
            )
    return lines


def write_json(
    path: Path,
    settings: Mapping[str, object],
    measured: Sequence[Measured],
    comparisons: Sequence[Comparison],
) -> None:
    """Everything, one object."""
    document = {
        "settings": settings,
        "runs": [
            {
                "server": one.name,
                "concurrency": one.load.concurrency or None,
                "rate": one.load.rate or None,
                "repetition": one.repetition,
                **asdict(one.figures),
            }
            for one in measured
        ],
        "auto_to_best": [
            {
                "concurrency": one.load.concurrency or None,
                "rate": one.load.rate or None,
                "best": one.best,
                "ratio": one.ratio,
                "half_width_95": one.half_width,
            }
            for one in comparisons
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _percentiles(
    figures: Sequence[Figures], part: Callable[[Figures], Percentiles | None], scale: float
) -> str:
    known = [value for one in figures if (value := part(one)) is not None]
    if not known:
        return "-"
    return " / ".join(
        f"{scale * statistics.median(getattr(one, name) for one in known):.3g}"
        for name in ("p50", "p90", "p99")
    )


def _median(
    figures: Sequence[Figures], part: Callable[[Figures], float | None], spelled: str
) -> str:
    known = [value for one in figures if (value := part(one)) is not None]
    return format(statistics.median(known), spelled) if known else "-"
