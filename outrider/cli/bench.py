"""`outrider bench`: a running server under load, or the own one restarted in several modes."""

import asyncio
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from outrider import __version__
from outrider.bench.envelope import compare
from outrider.bench.load import Load
from outrider.bench.measure import Measured, Plan, measure
from outrider.bench.plot import plot, require_plots
from outrider.bench.progress import progress_bar
from outrider.bench.report import print_report, warnings_of, write_json
from outrider.cli.cluster import Cluster
from outrider.cli.up import Work, run_up
from outrider.serving.errors import ConfigurationError

MODE = re.compile(r"off|auto|[1-9]\d?")
# Of each service's log, where its server did not start.
LOG_LINES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Where results go beside the table."""

    json: Path | None
    plot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """What is measured: what runs at `url`, or, with modes, own servers started for each."""

    url: str
    modes: Sequence[str]
    flags: Mapping[str, str]  # of every own server, by field name
    plan_cluster: Callable[[Mapping[str, str]], Cluster]  # from flags of `outrider up`


def flags_of(mode: str) -> dict[str, str]:
    """Of `outrider up`, by field name."""
    if mode in ("off", "auto"):
        return {"speculation": mode}
    return {"speculation": "fixed", "max_draft_length": mode}


def name_of(mode: str) -> str:
    """In tables and pictures."""
    return mode if mode in ("off", "auto") else f"{mode} drafts"


def parse_modes(text: str) -> list[str]:
    """`off,3,5,auto`; raises ConfigurationError."""
    modes = [one.strip() for one in text.split(",") if one.strip()]
    for mode in modes:
        if not MODE.fullmatch(mode):
            raise ConfigurationError(
                f"--modes: {mode!r} must be off, auto or a draft length from 1 to 99"
            )
    if len(set(modes)) < len(modes):
        raise ConfigurationError(f"--modes: {text!r} names a mode twice")
    return modes


def parse_flags(words: Sequence[str]) -> dict[str, str]:
    """`device=cuda` and so on, by field name; raises ConfigurationError."""
    flags = {}
    for word in words:
        name, separator, value = word.removeprefix("--").partition("=")
        if not separator or not name:
            raise ConfigurationError(f"--up: {word!r} must be FLAG=VALUE")
        flags[name.replace("-", "_")] = value
    return flags


def parse_loads(concurrency: str, rate: str) -> list[Load]:
    """`1,4,16` at once and `0.5,2` a second; raises ConfigurationError."""
    loads = []
    for text in filter(None, concurrency.split(",")):
        if not text.strip().isdecimal() or not int(text):
            raise ConfigurationError(f"--concurrency: {text!r} must be a whole number above 0")
        loads.append(Load(concurrency=int(text)))
    for text in filter(None, rate.split(",")):
        try:
            value = float(text)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise ConfigurationError(f"--rate: {text!r} must be a number above 0")
        loads.append(Load(rate=value))
    if not loads:
        raise ConfigurationError("--concurrency and --rate: one of them must name a load")
    return loads


def run_bench(
    servers: Servers,
    plan: Plan,
    *,
    repeat: int,
    output: Output,
) -> int:
    """Measures everything `repeat` times in turn and prints the table; returns the exit code.
    Raises ConfigurationError, BenchError and PlotError.
    """
    if output.plot is not None:
        require_plots()
    errors = Console(stderr=True)
    measured: list[Measured] = []
    # One repetition after another, so that what the machine does meanwhile falls on all alike.
    for repetition in range(repeat):
        for mode in servers.modes or [""]:
            name = name_of(mode) if mode else servers.url
            words = f"{name}, run {repetition + 1} of {repeat}"

            work = _work(plan, name, words, repetition, errors, measured)
            code = _with_own_server(servers, mode, work) if mode else asyncio.run(work(servers.url))
            if code:
                return code
    comparisons = compare(measured)
    print_report(measured, [one.words() for one in comparisons], warnings_of(measured))
    if output.json is not None:
        write_json(output.json, _settings(servers, plan, repeat), measured, comparisons)
    if output.plot is not None:
        plot(measured, output.plot, _title(plan))
    return 0


def _work(
    plan: Plan,
    name: str,
    words: str,
    repetition: int,
    console: Console,
    measured: list[Measured],
) -> Work:
    async def work(url: str) -> int:
        with progress_bar(console, plan, words) as advance:
            measured.extend(
                await measure(url, plan, name=name, repetition=repetition, advance=advance)
            )
        return 0

    return work


def _with_own_server(servers: Servers, mode: str, work: Work) -> int:
    with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
        logs = Path(folder)
        code = run_up(
            servers.plan_cluster({**servers.flags, **flags_of(mode)}), log_directory=logs, work=work
        )
        if code:
            for log in sorted(logs.iterdir()):
                lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
                for line in lines[-LOG_LINES:]:
                    print(f"{log.name}: {line}", file=sys.stderr)
    return code


def _settings(servers: Servers, plan: Plan, repeat: int) -> dict[str, object]:
    """What another run would need to be the same; no key."""
    return {
        "version": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors",
        "url": None if servers.modes else servers.url,
        "modes": list(servers.modes),
        "flags": dict(servers.flags),
        "prompts": len(plan.prompts),
        "requests": plan.requests,
        "warm_up": plan.warm_up,
        "repeat": repeat,
        "max_tokens": plan.max_tokens,
        "temperature": plan.temperature,
        "endpoint": "chat completions" if plan.is_chat else "completions",
        "ignore_eos": plan.ignores_eos,
        "seed": plan.seed,
        "model": plan.model,
    }


def _title(plan: Plan) -> str:
    return (
        f"{len(plan.prompts)} prompts, answers of up to {plan.max_tokens} tokens, temperature "
        f"{plan.temperature:g}"
    )
