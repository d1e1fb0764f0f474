"""How long a step waits for drafts."""

import numpy as np
import pytest

from target_service.draft_wait import EXPLORATION_PERIOD, MAX_EXTRA_SECONDS, DraftWait

PLAIN, VERIFY = 0.0045, 0.0050


def wait_of(emitted: float, *, plain: float = PLAIN, verify: float = VERIFY) -> DraftWait:
    """One that has seen many steps of one row, with so many tokens each."""
    wait = DraftWait([(1, 1.0), (64, 2.0)])
    for step in range(400):
        wait.observe_plain(1, plain)
        whole = int(emitted) + (step % 10 < round(emitted % 1 * 10))
        wait.observe_answered(1, verify, whole)
    return wait


def waits(wait: DraftWait, p50: float, p95: float, count: int = EXPLORATION_PERIOD) -> list[float]:
    return [wait.seconds(1, draft_latency_p50=p50, draft_latency_p95=p95) for _ in range(count)]


def test_before_anything_is_known_it_is_patient() -> None:
    wait = DraftWait([(1, 0.01), (64, 0.02)])
    assert waits(wait, 0.0, 0.0, 1) == [0.01 + MAX_EXTRA_SECONDS]
    assert wait.seconds(32, draft_latency_p50=0.004, draft_latency_p95=0.005) == 0.010


def test_it_waits_until_speculation_wins_nothing_more() -> None:
    gain = 2.5 * PLAIN - VERIFY
    usual, exploring = sorted(set(waits(wait_of(2.5), 0.003, 0.0035)))
    assert usual == pytest.approx(gain, rel=0.05)
    assert exploring == 2 * 0.0035
    assert set(waits(wait_of(2.5), 0.001, 0.002)) == {2 * 0.002}


def test_what_would_come_too_late_is_not_asked_for_but_now_and_then() -> None:
    """1.5 tokens a step win 1.75 ms; a draft takes 3."""
    found = waits(wait_of(1.5), 0.003, 0.0035, 10 * EXPLORATION_PERIOD)
    assert found.count(0.0) == 10 * (EXPLORATION_PERIOD - 1)
    assert sorted(set(found)) == [0.0, 2 * 0.0035]


def test_a_draft_that_comes_at_once_is_taken_whatever_the_averages_say() -> None:
    found = waits(wait_of(1.0), 0.0002, 0.0003)
    assert min(found) > 0.0002


def test_chance_does_not_end_the_waiting() -> None:
    """Tokens a step scatter: 1 to 6, by a mean of 2.6. A draft of 3 ms is worth 6.7 then."""
    generator = np.random.default_rng(3)
    wait = wait_of(2.6)
    in_vain = 0
    for _ in range(3_000):
        accepted = min(int(generator.geometric(1 - 0.62)) - 1, 5)
        wait.observe_answered(1, VERIFY, 1 + accepted)
        in_vain += waits(wait, 0.003, 0.0035, 1) == [0.0]
    assert in_vain == 0


def test_drafts_that_become_worth_their_time_are_asked_for_again() -> None:
    """Only steps that are asked for anyway can show it."""
    wait = wait_of(1.2)
    asked = 0
    for _ in range(1_000):
        if waits(wait, 0.003, 0.0035, 1) != [0.0]:
            wait.observe_answered(1, VERIFY, 3)
            asked += 1
    assert asked > 700
