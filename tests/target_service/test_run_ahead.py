"""An engine that is kept one plain step ahead: the same tokens, and not one block lost."""

import random
import time
from collections.abc import Sequence

import pytest
from fake_engine import VOCAB_SIZE, oracle
from test_step_loop import (
    DRAFT_LENGTH,
    GREEDY,
    Collector,
    Harness,
    no_draft,
    random_draft,
    right_draft,
)

from outrider.engine.sampling import Sampling
from outrider.v1 import generation_pb2
from target_service.policy import BYPASS_REASONS, LINK_DOWN
from target_service.sequence import Outcome, StepSummary
from target_service.threshold_bypass import RESUME_STEPS

PLAIN = ((1 << 16, 0),)
BYPASSED_NEVER = dict.fromkeys(BYPASS_REASONS, 0)


def plain_harness(*, num_blocks: int = 64, max_running: int = 8) -> Harness:
    """One whose policy drafts nothing."""
    harness = Harness(no_draft, num_blocks=num_blocks, max_running=max_running, runs_ahead=True)
    harness.set_policy(rules=PLAIN)
    return harness


@pytest.mark.parametrize("num_blocks", [64, 14], ids=["enough blocks", "preemption"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "with drafts now and then"])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_the_oracles_whoever_joins_ends_or_is_cancelled_on_the_way(
    num_blocks: int, drafts: bool, seed: int
) -> None:
    generator = random.Random(seed)
    random.seed(seed)
    harness = Harness(random_draft, num_blocks=num_blocks, runs_ahead=True)
    harness.set_policy(rules=PLAIN)
    expected: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    for sequence_id in range(30):
        prompt = [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, 40))]
        sampling = Sampling(
            temperature=generator.choice([0.0, 0.8, 1.3]),
            top_k=generator.choice([0, 5]),
            seed=sequence_id,
        )
        max_tokens = generator.randrange(1, 40)
        stops = frozenset(generator.sample(range(VOCAB_SIZE), generator.randrange(3)))
        expected[sequence_id] = oracle(prompt, sampling, max_tokens, stops)
        harness.admit(sequence_id, prompt, max_tokens, sampling, stops)
        for _ in range(generator.randrange(12)):
            if drafts and generator.random() < 0.2:
                drafted = ((generator.randrange(9), DRAFT_LENGTH), (9, generator.randrange(2)))
                harness.set_policy(
                    rules=generator.choice([PLAIN, drafted]),
                    max_decode_rows=generator.choice([None, 1, 3]),
                )
            if generator.random() < 0.05:
                victim = generator.choice(list(expected))
                cancelled.add(victim)
                harness.loop.cancel(harness.sink, frozenset([victim]))
            if harness.scheduler.has_work:
                harness.loop.step()
    harness.run()
    assert not harness.late.running
    for sequence_id, tokens in expected.items():
        got = harness.sink.tokens(sequence_id) if sequence_id in harness.sink.outcomes else []
        assert got == (tokens[: len(got)] if sequence_id in cancelled else tokens)
    assert harness.statistics.emitted_tokens == sum(
        len(outcome.emitted_token_ids)
        for outcomes in harness.sink.outcomes.values()
        for outcome in outcomes
    )
    assert sum(harness.late.rows_ahead) > 50
    assert (harness.scheduler.preemptions > 0) == (num_blocks == 14)


def test_all_plain_steps_but_the_first_run_ahead_and_an_end_known_beforehand_costs_no_row() -> None:
    harness = plain_harness()
    harness.admit(1, [1, 2, 3], 12, GREEDY)
    harness.admit(2, [4, 5, 6], 8, GREEDY)
    harness.run()
    assert harness.runner.rows_of_steps == [[3, 3], *[[1, 1]] * 7, *[[1]] * 4]
    # The prompts' step is followed by one that knows their tokens.
    assert harness.late.rows_ahead == [2] * 6 + [1] * 4
    assert harness.statistics.bypass_steps["draft_length_zero"] == 11


def test_the_row_behind_a_stop_token_is_dropped_and_its_blocks_come_back_behind_it() -> None:
    output = oracle([4, 5], GREEDY, 20)
    cut = next(at for at in range(3, 20) if output[at] not in output[:at])
    harness = plain_harness()
    harness.admit(1, [4, 5], 20, GREEDY, frozenset([output[cut]]))
    for _ in range(cut + 1):
        harness.loop.step()
    assert not harness.drafts.live
    assert harness.pool.num_used > 0
    harness.loop.step()
    assert harness.pool.num_used == 0
    assert not harness.scheduler.has_work
    assert harness.sink.tokens(1) == output[: cut + 1]
    assert harness.sink.finish_reason(1) == generation_pb2.FINISH_REASON_STOP
    assert len(harness.runner.rows_of_steps) == cut + 2
    assert [step.running_sequences for step in harness.sink.steps] == [1] * cut + [0]


def test_a_sequence_cancelled_while_its_next_step_runs_is_told_nothing_more() -> None:
    harness = plain_harness()
    harness.admit(1, [1], 30, GREEDY)
    harness.admit(2, [2], 30, GREEDY)
    for _ in range(5):
        harness.loop.step()
    assert harness.late.running
    harness.loop.cancel(harness.sink, frozenset([1]))
    # Once more does nothing, though its row is still there.
    harness.loop.cancel(harness.sink, frozenset([1]))
    assert harness.drafts.live == {1}
    harness.run()
    assert harness.sink.tokens(1) == oracle([1], GREEDY, 5)
    assert harness.sink.tokens(2) == oracle([2], GREEDY, 30)


def test_a_deadline_that_passes_while_the_next_step_runs_is_reported_once() -> None:
    harness = plain_harness()
    harness.admit(1, [1], 30, GREEDY, deadline=time.monotonic() + 0.02)
    for _ in range(4):
        harness.loop.step()
    assert harness.late.running
    # Steps do not look at the time; the loop does between them.
    time.sleep(0.03)
    for _ in range(2):
        harness.loop._end_overdue()
    harness.run()
    outcomes = harness.sink.outcomes[1]
    assert [outcome.finish_reason for outcome in outcomes] == [
        *[generation_pb2.FINISH_REASON_UNSPECIFIED] * 4,
        generation_pb2.FINISH_REASON_DEADLINE,
    ]


def test_a_place_that_is_known_to_become_free_is_taken_without_a_step_in_between() -> None:
    harness = plain_harness(max_running=2)
    harness.admit(1, [1, 2, 3], 5, GREEDY)
    harness.admit(2, [4, 5, 6], 9, GREEDY)
    harness.admit(3, [7, 8, 9], 3, GREEDY)
    harness.run()
    # The first ends with the fifth step; the third one's prompt is in the sixth.
    assert harness.runner.rows_of_steps == [[3, 3], *[[1, 1]] * 4, [1, 3], *[[1, 1]] * 2, [1]]
    assert harness.sink.tokens(3) == oracle([7, 8, 9], GREEDY, 3)


def test_a_prompt_that_joins_is_computed_behind_the_step_that_runs() -> None:
    harness = plain_harness()
    harness.admit(1, [1, 2], 12, GREEDY)
    for _ in range(4):
        harness.loop.step()
    assert len(harness.late.running) == 1
    harness.admit(2, [7] * 9, 4, GREEDY)
    for _ in range(2):
        harness.loop.step()
    assert harness.runner.rows_of_steps[-2:] == [[1], [1, 9]]
    harness.run()
    assert harness.sink.tokens(1) == oracle([1, 2], GREEDY, 12)
    assert harness.sink.tokens(2) == oracle([7] * 9, GREEDY, 4)


def test_nothing_runs_ahead_of_a_step_that_is_to_be_drafted() -> None:
    harness = Harness(right_draft, runs_ahead=True)
    harness.set_policy(rules=PLAIN)
    harness.admit(1, [1, 2, 3], 40, GREEDY)
    for _ in range(4):
        harness.loop.step()
    assert len(harness.late.running) == 1
    harness.set_policy(rules=((64, DRAFT_LENGTH),))
    harness.loop.step()
    assert not harness.late.running
    assert harness.drafts.asks == [{0: DRAFT_LENGTH}]
    num_ahead = len(harness.late.rows_ahead)
    harness.run()
    assert len(harness.late.rows_ahead) == num_ahead
    assert harness.sink.tokens(1) == oracle([1, 2, 3], GREEDY, 40)


def test_an_end_that_allows_drafts_has_them_asked_for_behind_the_step_that_runs_already() -> None:
    output = oracle([4, 5], GREEDY, 20)
    cut = next(at for at in range(3, 20) if output[at] not in output[:at])
    harness = Harness(right_draft, runs_ahead=True)
    harness.set_policy(rules=((64, DRAFT_LENGTH),), max_decode_rows=1)
    harness.admit(1, [1, 2], 40, GREEDY)
    harness.admit(2, [4, 5], 20, GREEDY, frozenset([output[cut]]))
    for _ in range(cut + 1):
        harness.loop.step()
    assert not harness.drafts.live - {0} and len(harness.late.running) == 1
    # One sequence is left, but the bypass has its dwell, and for the step that runs when that is
    # over nothing can be asked any more.
    for _ in range(RESUME_STEPS):
        assert harness.drafts.asks == []
        harness.loop.step()
    while not harness.drafts.asks:
        assert len(harness.late.running) <= 1
        harness.loop.step()
    assert harness.drafts.asks == [{0: DRAFT_LENGTH}]
    assert len(harness.sink.tokens(1)) < cut + RESUME_STEPS + 5
    harness.run()
    assert harness.sink.tokens(1) == oracle([1, 2], GREEDY, 40)
    assert harness.sink.tokens(2) == output[: cut + 1]


def test_a_link_that_comes_up_while_two_steps_run_is_asked_behind_both() -> None:
    class LinkComesUp(Collector):
        """Is reported to in mid-step."""

        def report(self, outcomes: Sequence[Outcome], step: StepSummary) -> None:
            super().report(outcomes, step)
            if step.step_id == 4:
                assert len(harness.late.running) == 2
                harness.drafts.reason = None

    harness = Harness(right_draft, runs_ahead=True)
    harness.drafts.reason = LINK_DOWN
    harness.sink = LinkComesUp()
    harness.admit(1, [1, 2], 40, GREEDY)
    for _ in range(5):
        harness.loop.step()
    assert harness.drafts.reason is None
    assert harness.drafts.asks == []
    harness.loop.step()
    assert harness.drafts.asks == [{0: DRAFT_LENGTH}]
    harness.run()
    # What was asked for is what is verified.
    assert harness.statistics.bypass_steps == {**BYPASSED_NEVER, LINK_DOWN: 5}
    assert harness.sink.tokens(1) == oracle([1, 2], GREEDY, 40)


def test_steps_ahead_under_a_threshold_flush_nothing() -> None:
    harness = Harness(right_draft, runs_ahead=True)
    harness.set_policy(rules=((64, DRAFT_LENGTH),), max_decode_rows=0)
    harness.admit(1, [1], 10, GREEDY)
    for _ in range(6):
        harness.loop.step()
    assert harness.late.rows_ahead
    assert harness.drafts.flushes == [True] * 6
    assert harness.statistics.bypass_steps["threshold"] == 6


def test_steps_ahead_have_the_seconds_between_their_ends() -> None:
    harness = plain_harness()
    harness.admit(1, [1], 40, GREEDY)
    started = time.perf_counter()
    harness.run()
    wall = time.perf_counter() - started
    assert all(0 < step.forward_seconds <= step.step_seconds for step in harness.sink.steps)
    assert 0.5 * wall < sum(step.step_seconds for step in harness.sink.steps) <= wall
