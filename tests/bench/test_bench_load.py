"""Closed and open loops: how many at once, and when."""

import asyncio
import statistics
import time

import pytest

from outrider.bench.answer import Answer
from outrider.bench.load import Load, Run, run_load


class Asked:
    """Takes requests and notes how many run and when they came."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.running = self.most = 0
        self.came: list[float] = []
        self.indices: list[int] = []

    async def __call__(self, index: int) -> Answer:
        self.came.append(time.perf_counter())
        self.indices.append(index)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.seconds)
        self.running -= 1
        return Answer(asked=self.came[-1], ended=time.perf_counter())


def run(load: Load, count: int, asked: Asked, seed: int = 0) -> Run:
    heard: list[None] = []
    result = asyncio.run(
        run_load(load, count, asked, seed=seed, progress=lambda: heard.append(None))
    )
    assert len(heard) == len(result.answers) == count
    assert sorted(asked.indices) == list(range(count))
    return result


@pytest.mark.parametrize(("concurrency", "count"), [(1, 4), (3, 10), (8, 5)])
def test_a_closed_loop_has_so_many_running_and_never_more(concurrency: int, count: int) -> None:
    asked = Asked(0.02)
    result = run(Load(concurrency=concurrency), count, asked)
    assert asked.most == min(concurrency, count)
    rounds = -(-count // concurrency)
    assert 0.02 * rounds <= result.seconds < 0.02 * rounds + 0.5


def test_an_open_loop_asks_at_the_rate_whether_answers_come_or_not() -> None:
    asked = Asked(0.3)
    run(Load(rate=200.0), 60, asked)
    gaps = [later - earlier for earlier, later in zip(asked.came, asked.came[1:], strict=False)]
    assert 0.003 < statistics.fmean(gaps) < 0.012
    # Exponential: as many short pauses as long ones, unlike a regular rhythm.
    assert max(gaps) > 2 * statistics.fmean(gaps)
    assert asked.most > 20


def test_arrivals_follow_from_the_seed() -> None:
    def pattern(seed: int) -> list[bool]:
        asked = Asked(0)
        run(Load(rate=50.0), 12, asked, seed)
        gaps = [b - a for a, b in zip(asked.came, asked.came[1:], strict=False)]
        return [gap > 0.02 for gap in gaps]

    patterns = [pattern(1), pattern(1), pattern(2)]
    agreeing = sum(a == b for a, b in zip(patterns[0], patterns[1], strict=True))
    assert agreeing >= 9
    assert patterns[0] != patterns[2]


def test_a_load_says_what_it_is() -> None:
    assert (Load(concurrency=16).words(), Load(concurrency=16).size) == ("16 at once", 16.0)
    assert (Load(rate=2.5).words(), Load(rate=2.5).size) == ("2.5/s", 2.5)
