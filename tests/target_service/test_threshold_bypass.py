"""When the bypass above the threshold begins and ends."""

import pytest

from target_service.policy import Policy
from target_service.threshold_bypass import RESUME_STEPS, ThresholdBypass

BOUND = 4


def run(rows: list[int], policy: Policy) -> list[bool]:
    """For each step whether it was bypassed, the steps before it being known."""
    bypass, found = ThresholdBypass(), []
    for decode_rows in rows:
        found.append(bypass.is_on(policy, decode_rows))
        bypass.observe(policy, decode_rows)
    return found


@pytest.mark.parametrize(("rows", "is_on"), [(0, False), (1, False), (BOUND, False), (5, True)])
def test_a_step_above_the_bound_is_bypassed_at_once(rows: int, is_on: bool) -> None:
    assert run([rows], Policy(max_decode_rows=BOUND)) == [is_on]


def test_it_ends_when_the_load_has_stayed_down() -> None:
    found = run([5] + [4] * (RESUME_STEPS + 2), Policy(max_decode_rows=BOUND))
    assert found == [True] * (1 + RESUME_STEPS) + [False] * 2


def test_a_load_that_swings_around_the_bound_stays_bypassed() -> None:
    assert all(run([5, 3, 4, 5, 2, 4, 3] * 20, Policy(max_decode_rows=BOUND)))


def test_an_idle_step_forgets_the_load_that_was() -> None:
    assert run([5, 4, 0, 4], Policy(max_decode_rows=BOUND)) == [True, True, True, False]


def test_without_a_bound_nothing_is_bypassed() -> None:
    assert not any(run([1, 100, 1], Policy()))
    bypass = ThresholdBypass()
    bypass.observe(Policy(max_decode_rows=BOUND), 5)
    assert not bypass.is_on(Policy(), 5)
