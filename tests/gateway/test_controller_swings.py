"""Loads that swing around the batch threshold, and drafters that turn bad: the controller with the
target's own rule for the bypass, in simulated time.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import pytest
from test_controller import FORWARD, Target, asked, controller_of

from gateway.controller import Controller
from target_service.policy import Policy
from target_service.threshold_bypass import RESUME_STEPS, ThresholdBypass

THRESHOLD = 8
# Milliseconds of a forward by rows where every row costs, as on a few cores.
FORWARD_ON_CORES = {1: 12.0, 8: 15.0, 16: 19.0, 32: 32.0, 64: 60.0, 128: 118.0}
FORWARDS = {"gpu": FORWARD, "cores": FORWARD_ON_CORES}


def swinging(half_period: int) -> Iterator[int]:
    """Decode rows of one step after another."""
    while True:
        yield from [THRESHOLD - 2] * half_period
        yield from [THRESHOLD + 2] * half_period


def chosen(controller: Controller, rows: int) -> int:
    """The draft length, short looks at others aside."""
    return next(
        bucket.draft_length for bucket in controller.view() if rows <= bucket.max_decode_rows
    )


class Simulation:
    """What the target asks for in every step, and what it takes."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.controller: Controller = controller_of(target, max_decode_rows=THRESHOLD)
        self.bypass = ThresholdBypass()
        self.steps: list[tuple[int, int, float]] = []  # rows, draft length, seconds
        self.tokens = 0.0

    def step(self, rows: int) -> None:
        policy = self.controller.policy
        table = Policy(rules=policy.rules, max_decode_rows=policy.max_decode_rows)
        length = 0 if self.bypass.is_on(table, rows) else asked(self.controller, rows)
        seen = self.target.step(rows, length)
        self.controller.observe(seen)
        self.bypass.observe(table, rows)
        self.steps.append((rows, length, seen.seconds))
        self.tokens += rows * self.target.mean_tokens(length)

    def rate(self) -> float:
        """Tokens per second so far; forgets them."""
        tokens, seconds = self.tokens, sum(seconds for *_, seconds in self.steps)
        self.tokens, self.steps = 0.0, []
        return tokens / seconds


def learned(target: Target) -> Simulation:
    """One that has seen both sides of the threshold."""
    simulation = Simulation(target)
    for rows in [*[THRESHOLD - 2] * 600, *[THRESHOLD + 2] * 200]:
        simulation.step(rows)
    simulation.rate()
    return simulation


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("half_period", [1, 3, 7, 20, 200])
def test_around_the_threshold_it_returns_once_a_dwell_and_no_step_stands_out(
    forward: str, half_period: int
) -> None:
    simulation = learned(Target(11, 0.8, forward=FORWARDS[forward]))
    began = simulation.target.now
    for rows in swinging(half_period):
        simulation.step(rows)
        if simulation.target.now - began > 60:
            break
    returns = [
        index
        for index, (before, after) in enumerate(pairwise(simulation.steps), start=1)
        if after[1] > 0 and before[1] == 0
    ]
    above = [index for index, (rows, *_) in enumerate(simulation.steps) if rows > THRESHOLD]
    assert above
    assert not any(simulation.steps[index][1] for index in above)
    # A look at draft length 0 in a stretch of drafts is none of the threshold's returns.
    last_above = defaultdict(int)
    for index in returns:
        behind = max((one for one in above if one < index), default=-RESUME_STEPS)
        assert index - behind > RESUME_STEPS
        last_above[behind] += 1
    assert bool(returns) == (half_period > RESUME_STEPS)
    for speculates in (False, True):
        seconds = [one for _, length, one in simulation.steps if (length > 0) == speculates]
        if seconds:
            assert max(seconds) <= 2 * statistics.median(seconds)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("half_period", [100, 400])
def test_a_swing_costs_little_beside_the_loads_that_it_swings_between(
    forward: str, half_period: int
) -> None:
    simulation = learned(Target(12, 0.8, forward=FORWARDS[forward]))
    steady = []
    for rows in (THRESHOLD - 2, THRESHOLD + 2):
        for _ in range(800):
            simulation.step(rows)
        count = len(simulation.steps)
        steady.append((simulation.tokens / count, simulation.rate()))
    for rows, _ in zip(swinging(half_period), range(4000), strict=False):
        simulation.step(rows)
    # As many steps of one as of the other.
    best = sum(tokens for tokens, _ in steady) / sum(tokens / rate for tokens, rate in steady)
    assert simulation.rate() >= 0.95 * best


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("seed", range(2))
def test_a_drafter_that_turns_bad_costs_at_most_3_percent_after_100_steps(
    forward: str, rows: int, seed: int
) -> None:
    """Random tokens: none of them is ever right."""
    target = Target(seed, 0.8, forward=FORWARDS[forward])
    controller = controller_of(target)

    def steps(count: int) -> float:
        """Tokens per second of so many steps, by their true means."""
        tokens = seconds = 0.0
        for _ in range(count):
            length = asked(controller, rows)
            controller.observe(target.step(rows, length))
            tokens += rows * target.mean_tokens(length)
            seconds += target.mean_seconds(rows, length)
        return tokens / seconds

    steps(600)
    before = chosen(controller, rows)
    target.rate = 0.0
    steps(100)
    for stretch in range(8):
        share = steps(250) / target.throughput(rows, 0)
        assert share >= 0.97, (stretch, share)
    target.rate = 0.8
    began = target.now
    while before and not chosen(controller, rows):
        steps(1)
        assert target.now - began < 10
    steps(200)
    assert steps(400) >= 0.97 * target.envelope(rows)
