"""The command `python -m training.generate`: a target writes the conversations that a head learns
from, prompts included, at the rate of a batch of thousands.

Short conversations come first, and among them the target writes articles; then long prompts are
made of these and of documents given by file.
"""

import argparse
import gc
import json
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import torch

from outrider.serving.model_source import resolve_model
from training import author_worker
from training.author import Job
from training.batch_decoder import BatchDecoder, RowRequest
from training.decode_attention import DecodeAttention, checked_triton_attention, matmul_attention
from training.documents import InputError, read_documents, read_prompts
from training.job_feed import InlineExecutor, JobFeed, Make
from training.progress import Progress, open_progress
from training.row_store import RowStore
from training.target import DenseTarget, load_target
from training.token_choice import TokenChoice, checked_kernel_choice, plain_choice

# Written last: a directory that has it is complete.
SUMMARY_FILE: Final = "summary.json"
_STEPS: Final = 16  # decoded between two looks at the rows
_BATCH: Final = 64  # jobs of one worker's call
_GIVEN_SHARE: Final = 0.35
_PASSAGES: Final = (2, 5)
# The last answers are digested and the last shards written in this part of the time.
_CLOSING_SHARE: Final = 0.02
_REPORT_SECONDS: Final = 10.0

# What building a kernel without triton, a compiler or a fitting device raises.
_KERNEL_ERRORS: Final = (ImportError, RuntimeError, OSError, subprocess.CalledProcessError)


@dataclass(slots=True)
class Pace:
    """How fast one part of the run was."""

    seconds: float = 0.0
    new_tokens: int = 0
    prompt_tokens: int = 0
    finished: int = 0
    waited_seconds: float = 0.0  # the host for the device; near zero means the host is too slow

    def line(self, name: str, feed_rows: int) -> str:
        rate = self.new_tokens / max(self.seconds, 1e-9)
        return (
            f"{name}: {self.seconds:.0f} s, {self.new_tokens} new tokens, {rate:.0f} a second, "
            f"{self.prompt_tokens} prompt tokens, {self.finished} texts, {feed_rows} rows, "
            f"waited {self.waited_seconds:.0f} s for the device"
        )


def drive(
    decoder: BatchDecoder,
    feed: JobFeed,
    store: RowStore,
    *,
    name: str,
    end: float,
    report: Callable[[str], None],
) -> Pace:
    """Decode jobs until the clock (time.monotonic) passes `end`; unfinished answers count too."""
    pace = Pace()
    begin = time.monotonic()
    report_at = begin + _REPORT_SECONDS
    running: dict[int, Job] = {}

    def fits(job: Job) -> bool:
        return decoder.fits(_request(job))

    while time.monotonic() < end:
        slots = decoder.free_slots()
        jobs = feed.take(len(slots), fits) if slots else []
        if jobs:
            used = slots[: len(jobs)]
            decoder.admit(used, [_request(job) for job in jobs])
            running.update(zip(used, jobs, strict=True))
            pace.prompt_tokens += sum(len(job.prompt_ids) for job in jobs)
        if not running:
            break
        decoder.run(_STEPS)
        feed.top_up()
        store.add(feed.take_rows())
        waiting_since = time.monotonic()
        finished = decoder.harvest()
        pace.waited_seconds += time.monotonic() - waiting_since
        feed.finish([(running.pop(row.slot), row.token_ids, row.ended) for row in finished])
        pace.finished += len(finished)
        pace.new_tokens += sum(len(row.token_ids) for row in finished)
        pace.seconds = time.monotonic() - begin
        if time.monotonic() >= report_at:
            report_at += _REPORT_SECONDS
            report(pace.line(name, store.rows.total()))
    left = decoder.harvest_all()
    feed.finish([(running.pop(row.slot), row.token_ids, row.ended) for row in left])
    feed.drain()
    store.add(feed.take_rows())
    pace.new_tokens += sum(len(row.token_ids) for row in left)
    pace.seconds = time.monotonic() - begin
    report(pace.line(name, store.rows.total()))
    return pace


def generate(arguments: argparse.Namespace, progress: Progress) -> dict[str, object]:
    """Write the shards and the summary, which is returned; raises what reading its inputs raises.

    `progress` is not used before the worker processes have been made, since it may start a thread.
    """
    begin = time.monotonic()

    def report(text: str) -> None:
        progress.show(min(1.0, (time.monotonic() - begin) / arguments.max_seconds), text)

    rng = random.Random(arguments.seed)
    source = resolve_model(arguments.target)
    documents = [text for path in arguments.documents for text in read_documents(path)]
    chats = [chat for path in arguments.prompts for chat in read_prompts(path)]
    rng.shuffle(chats)
    # Workers fork before the device is in use.
    executor = _executor(arguments.workers, source.path, arguments.row_length)
    arguments.output.mkdir(parents=True, exist_ok=True)
    store = RowStore(arguments.output)
    try:
        torch.manual_seed(arguments.seed)
        target = load_target(
            source.path, dtype=getattr(torch, arguments.dtype), device=arguments.device
        )
        operations = _operations(arguments.kernels, target, progress)
        progress.note(f"{source.name}: loaded after {time.monotonic() - begin:.1f} s")
        end = begin + arguments.max_seconds * (1 - _CLOSING_SHARE)
        now = time.monotonic()

        made = {"given": 0, "short": 0}

        def make_short(count: int) -> "Future[list[Job]]":
            seed = rng.getrandbits(63)
            if chats and made["given"] <= _GIVEN_SHARE * sum(made.values()):
                part = [chats.pop() for _ in range(min(count, len(chats)))]
                made["given"] += len(part)
                return executor.submit(author_worker.given_jobs, part, seed)
            made["short"] += count
            return executor.submit(author_worker.short_jobs, count, seed)

        short_feed = _feed(executor, make_short, arguments.rows, rng)
        short = _drive_pool(
            target, operations, short_feed, store, rows=arguments.rows,
            length=arguments.row_length, name="short",
            end=now + (end - now) * (1 - arguments.long_share), report=report,
        )  # fmt: skip
        texts = documents + short_feed.documents
        rng.shuffle(texts)
        order: list[int] = []

        def make_long(count: int) -> "Future[list[Job]]":
            groups = []
            for _ in range(count):
                if not order:
                    order.extend(rng.sample(range(len(texts)), len(texts)))
                others = rng.choices(texts, k=rng.randint(*_PASSAGES) - 1)
                groups.append([texts[order.pop()], *others])
            return executor.submit(author_worker.long_jobs, groups, rng.getrandbits(63))

        long_feed = _feed(executor, make_long, arguments.long_rows, rng)
        if texts and arguments.long_share > 0:
            long = _drive_pool(
                target, operations, long_feed, store, rows=arguments.long_rows,
                length=arguments.long_row_length, name="long", end=end, report=report,
            )  # fmt: skip
        else:
            long = Pace()
        store.close()
    finally:
        executor.shutdown(cancel_futures=True)
    summary: dict[str, object] = {
        "target": source.name,
        "seconds": round(time.monotonic() - begin, 1),
        "rows": store.rows,
        "tokens": store.tokens,
        "answer_tokens": store.answer_tokens,
        "answer_tokens_per_second": round(store.answer_tokens.total() / (time.monotonic() - begin)),
        "rows_by_kind": dict(store.by_kind.most_common()),
        "documents": {"given": len(documents), "written": len(short_feed.documents)},
        "prompts_given": {"left": len(chats)},
        "filters": dict((short_feed.counts + long_feed.counts).most_common()),
        "short": asdict(short),
        "long": asdict(long),
    }
    text = json.dumps(summary, indent=2)
    (arguments.output / SUMMARY_FILE).write_text(text + "\n", encoding="utf-8")
    return summary


def _drive_pool(
    target: DenseTarget,
    operations: tuple[DecodeAttention, TokenChoice],
    feed: JobFeed,
    store: RowStore,
    *,
    rows: int,
    length: int,
    name: str,
    end: float,
    report: Callable[[str], None],
) -> Pace:
    length = min(length, target.config.max_position_embeddings)
    attention, choice = operations
    seed = torch.initial_seed() % 2**31 * 2**20
    decoder = BatchDecoder(
        target, rows=rows, length=length, attention=attention, choice=choice, seed=seed
    )
    feed.top_up()
    pace = drive(decoder, feed, store, name=name, end=end, report=report)
    # The next pool's cache needs the room of this one's.
    del decoder
    gc.collect()
    if target.embedding.is_cuda:
        torch.cuda.empty_cache()
    return pace


def _request(job: Job) -> RowRequest:
    return RowRequest(
        prompt_ids=job.prompt_ids,
        max_new_tokens=job.max_new_tokens,
        temperature=job.temperature,
        min_p=job.min_p,
    )


def _feed(executor: Executor, make: Make, rows: int, rng: random.Random) -> JobFeed:
    batch = min(_BATCH, rows)
    return JobFeed(executor, make, ahead=max(rows // 2, batch), batch=batch, rng=rng)


def _executor(workers: int, model_path: Path, row_length: int) -> Executor:
    if not workers:
        author_worker.start(model_path, row_length)
        return InlineExecutor()
    executor = ProcessPoolExecutor(
        max_workers=workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=author_worker.start,
        initargs=(model_path, row_length),
    )
    # The first call starts the processes.
    executor.submit(author_worker.short_jobs, 1, 0).result()
    return executor


def _operations(
    name: str, target: DenseTarget, progress: Progress
) -> tuple[DecodeAttention, TokenChoice]:
    if name == "torch" or (name == "auto" and not target.embedding.is_cuda):
        return matmul_attention, plain_choice
    try:
        attention = checked_triton_attention(target.config, target.embedding)
        choice = checked_kernel_choice(target.embedding)
    except _KERNEL_ERRORS as error:
        if name != "auto":
            raise
        progress.note(f"decoding without own kernels, more slowly: {error}")
        return matmul_attention, plain_choice
    return attention, choice


def parser() -> argparse.ArgumentParser:
    """The command's options; their defaults depend on the device."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = device == "cuda"
    options = argparse.ArgumentParser(
        prog="python -m training.generate",
        description="Let a target write conversations to train a head on.",
    )
    options.add_argument("--target", default="smollm2-135m-instruct", help="model reference")
    options.add_argument("--output", type=Path, required=True, help="directory for the shards")
    options.add_argument("--max-seconds", type=float, default=240.0, help="for the whole command")
    options.add_argument(
        "--documents", type=Path, action="append", default=[], metavar="FILE",
        help="texts to summarise and to ask about: JSONL with text, or one a line",
    )  # fmt: skip
    options.add_argument(
        "--prompts", type=Path, action="append", default=[], metavar="FILE",
        help="prompts to answer: JSONL with prompt or messages",
    )  # fmt: skip
    options.add_argument("--device", default=device)
    options.add_argument("--dtype", choices=("bfloat16", "float32"), default=None)
    options.add_argument("--kernels", choices=("auto", "triton", "torch"), default="auto")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--workers", type=int, default=12 if on_gpu else 0)
    options.add_argument("--rows", type=int, default=4096 if on_gpu else 16)
    options.add_argument("--row-length", type=int, default=640, help="tokens")
    options.add_argument("--long-rows", type=int, default=2048 if on_gpu else 4)
    options.add_argument("--long-row-length", type=int, default=1280, help="tokens")
    options.add_argument("--long-share", type=float, default=0.4, help="of the time")
    return options


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, defaults filled in; exits with usage on a bad one, as argparse does."""
    options = parser()
    arguments = options.parse_args(argv)
    if arguments.dtype is None:
        arguments.dtype = "bfloat16" if arguments.device.startswith("cuda") else "float32"
    if not 0 <= arguments.long_share < 1:
        options.error(f"--long-share is {arguments.long_share}: must be from 0 to below 1")
    if arguments.max_seconds <= 0:
        options.error(f"--max-seconds is {arguments.max_seconds}: must be above 0")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    progress = open_progress()
    try:
        summary = generate(arguments, progress)
    except (InputError, OSError) as error:
        parser().error(str(error))
    finally:
        progress.close()
    print(json.dumps(summary, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
