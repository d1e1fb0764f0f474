"""The same prompts through Outrider, llama.cpp's server and Hugging Face transformers, in one run.

    python -m bench.peers.install            # once; a quarter of an hour on two cores
    python -m bench.peers [PROMPTS.jsonl] [--dtype float32] [--concurrency 1,16] [--repeat 2]
        [--servers outrider-none outrider llama.cpp ...] [--json FILE] [--plot FILE]

One server runs at a time, started for its turn; each repetition has a turn of every one, so that
what the machine does meanwhile falls on all alike. All compute the same file: Outrider and
transformers with its weights unpacked to --dtype, llama.cpp packed as they are, and once more
unpacked. transformers answers one request at a time and is measured at concurrency 1 only.

Greedy; every answer has the same number of tokens. No load is asked what another was, so that
nobody's cache of prompts counts.
"""

import argparse
import asyncio
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from bench.peers.contenders import CONTENDERS, Contender, Setup, StartError, running
from bench.peers.install import InstallError, installed, versions
from outrider import __version__
from outrider.bench.load import Load
from outrider.bench.measure import BenchError, Measured, Plan, measure
from outrider.bench.plot import PlotError, plot, require_plots
from outrider.bench.progress import progress_bar
from outrider.bench.prompts import PromptError, read_prompts
from outrider.bench.report import print_report, warnings_of, write_json
from outrider.cli.bench import parse_loads
from outrider.engine.config import resolve_dtype
from outrider.serving.errors import ConfigurationError
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model

FAILURES = (BenchError, ConfigurationError, InstallError, PlotError, PromptError, StartError)
# Beside a prompt, what an answer and its template may take.
LONGEST_PROMPT_TOKENS = 1984


def plans_of(plan: Plan) -> list[Plan]:
    """One for each load, with prompts of its own as far as there are enough."""
    stride = len(plan.loads)
    return [
        replace(plan, loads=[load], prompts=plan.prompts[index::stride] or plan.prompts)
        for index, load in enumerate(plan.loads)
    ]


async def measure_contender(
    contender: Contender, plans: Sequence[Plan], repetition: int, console: Console
) -> list[Measured]:
    """All loads of one server that runs for them alone."""
    measured: list[Measured] = []
    with running(contender) as url:
        for plan in plans:
            if contender.answers_one_at_a_time and plan.loads[0].size > 1:
                continue
            words = f"{contender.name}, {plan.loads[0].words()}, run {repetition + 1}"
            with progress_bar(console, plan, words) as advance:
                measured += await measure(
                    url, plan, name=contender.name, repetition=repetition, advance=advance
                )
    return measured


def differing_prompts(measured: Sequence[Measured]) -> list[str]:
    """A line for each load where not all servers saw as many prompt tokens: where their tokenizers
    or chat templates differ, they were not asked the same.
    """
    seen: dict[tuple[Load, int], dict[str, int]] = {}
    for one in measured:
        if not one.figures.errors:
            tokens = one.figures.prompt_tokens
            seen.setdefault((one.load, one.repetition), {})[one.name] = tokens
    return [
        f"{load.words()}, run {repetition + 1}: the prompts have "
        + ", ".join(f"{tokens} tokens for {name}" for name, tokens in by_name.items())
        for (load, repetition), by_name in seen.items()
        if len(set(by_name.values())) > 1
    ]


def processor_name() -> str:
    """As Linux says, with the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, nargs="?", help="JSON Lines; none: a small own set")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    parser.add_argument("--servers", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--concurrency", default="1,16")
    parser.add_argument("--requests", type=int, default=8, help="of a run; or its concurrency")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of the peers")
    parser.add_argument("--draft-tokens", type=int, default=5, help="of the peers' speculation")
    parser.add_argument("--assistant-layers", type=int, default=24, help="of assisted's drafter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        return compare_servers(arguments)
    except FAILURES as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1


def compare_servers(arguments: argparse.Namespace) -> int:
    """Raises what the parts do where a server cannot be had, started or measured."""
    if arguments.plot is not None:
        require_plots()
    loads = parse_loads(arguments.concurrency, "")
    most_at_once = max(load.concurrency for load in loads)
    dtype = str(resolve_dtype(arguments.dtype)).removeprefix("torch.")
    setup = Setup(
        model=resolve_model(arguments.model).path,
        dtype=dtype,
        threads=arguments.threads,
        most_at_once=most_at_once,
        context=LONGEST_PROMPT_TOKENS + arguments.max_tokens,
        draft_tokens=arguments.draft_tokens,
        assistant_layers=arguments.assistant_layers,
        peers=installed(),
    )
    chosen = [CONTENDERS[name](setup) for name in arguments.servers]
    plan = Plan(
        prompts=read_prompts(arguments.prompts),
        loads=loads,
        requests=0,
        warm_up=-1,
        max_tokens=arguments.max_tokens,
        temperature=0.0,
        is_chat=True,
        ignores_eos=True,
        seed=arguments.seed,
        model="",
    )
    plans = [
        replace(one, requests=max(arguments.requests, 2 * one.loads[0].concurrency))
        for one in plans_of(plan)
    ]
    console = Console(stderr=True)
    measured: list[Measured] = []
    for repetition in range(arguments.repeat):
        for contender in chosen:
            measured += asyncio.run(measure_contender(contender, plans, repetition, console))
    print_report(measured, [], [*warnings_of(measured), *differing_prompts(measured)])
    if arguments.json is not None:
        settings = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "processor": processor_name(),
            "versions": {"outrider": __version__, **versions(setup.peers)},
            "dtype": dtype,
            **{name: getattr(arguments, name) for name in
               ("model", "requests", "max_tokens", "repeat", "threads", "draft_tokens",
                "assistant_layers", "seed")},
        }  # fmt: skip
        write_json(arguments.json, settings, measured, [])
    if arguments.plot is not None:
        title = f"{setup.model.stem}, {dtype}, {processor_name()}"
        plot(measured, arguments.plot, title)
    return 0


if __name__ == "__main__":
    sys.exit(main())
