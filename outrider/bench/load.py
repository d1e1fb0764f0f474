"""How requests follow each other: so many at once, or as they come.

A closed loop asks again as soon as an answer has ended: it finds a server's throughput. An open
loop asks at random times (a Poisson process), whether the server keeps up or not: it finds the
latency that users of a given number see.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from outrider.bench.answer import Answer

Ask = Callable[[int], Awaitable[Answer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A closed loop of `concurrency`, or an open one of `rate` requests a second."""

    concurrency: int = 0
    rate: float = 0.0

    def words(self) -> str:
        """`16 at once`, `2.5/s`."""
        return f"{self.concurrency} at once" if self.concurrency else f"{self.rate:g}/s"

    @property
    def size(self) -> float:
        """Its place on an axis."""
        return float(self.concurrency) or self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All answers of one load."""

    answers: Sequence[Answer]
    seconds: float  # from the first request to the last answer's end
    client_share: float  # of that time, spent by this process on a processor


async def run_load(
    load: Load, count: int, ask: Ask, *, seed: int, progress: Callable[[], None]
) -> Run:
    """Asks `count` times, `ask(index)` each, and waits for all answers."""
    started, busy = time.perf_counter(), time.process_time()
    runs = _closed if load.concurrency else _open
    answers = await runs(load, count, ask, seed, progress)
    seconds = time.perf_counter() - started
    return Run(
        answers=answers,
        seconds=seconds,
        client_share=(time.process_time() - busy) / seconds,
    )


async def _closed(
    load: Load, count: int, ask: Ask, seed: int, progress: Callable[[], None]
) -> list[Answer]:
    answers: list[Answer] = []
    indices = iter(range(count))

    async def worker() -> None:
        for index in indices:
            answers.append(await ask(index))
            progress()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(load.concurrency, count)):
            tasks.create_task(worker())
    return answers


async def _open(
    load: Load, count: int, ask: Ask, seed: int, progress: Callable[[], None]
) -> list[Answer]:
    generator = random.Random(seed)
    answers: list[Answer] = []

    async def one(index: int) -> None:
        answers.append(await ask(index))
        progress()

    due = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for index in range(count):
            # From the time it was due, not from now: a client that is late once must catch up.
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.create_task(one(index))
            due += generator.expovariate(load.rate)
    return answers
