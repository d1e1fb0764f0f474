"""The step loop against an oracle that decodes one token at a time."""

import random
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
from fake_drafts import FakeDrafts, Propose
from fake_engine import VOCAB_SIZE, FakeRunner, FakeSteps, LateSteps, WatchedPool, oracle

from outrider.engine.logit_rules import LogitRules
from outrider.engine.sampling import Sampling
from outrider.serving.grammar_compiler import Grammar
from outrider.v1 import generation_pb2, target_pb2
from target_service.policy import Policy
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.sequence import Outcome, Request, StepSummary
from target_service.sequence import Sequence as TokenSequence
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop

BLOCK_SIZE = 8
STOP_TOKEN_ID = 9
DRAFT_LENGTH = 4


class Collector:
    """A ReportSink that keeps everything."""

    def __init__(self) -> None:
        self.outcomes: dict[int, list[Outcome]] = {}
        self.steps: list[StepSummary] = []
        self.rejected: dict[int, int] = {}
        self.words: dict[int, str] = {}

    def report(self, outcomes: Sequence[Outcome], step: StepSummary) -> None:
        self.steps.append(step)
        for outcome in outcomes:
            self.outcomes.setdefault(outcome.sequence_id, []).append(outcome)

    def reject(self, sequence_id: int, reason: int, message: str) -> None:
        self.rejected[sequence_id] = reason
        self.words[sequence_id] = message

    def tokens(self, sequence_id: int) -> list[int]:
        return [
            token_id
            for outcome in self.outcomes[sequence_id]
            for token_id in outcome.emitted_token_ids
        ]

    def finish_reason(self, sequence_id: int) -> int:
        return self.outcomes[sequence_id][-1].finish_reason


class Harness:
    """A step loop over the fake model, stepped by hand."""

    def __init__(
        self,
        propose: Propose,
        *,
        num_blocks: int = 64,
        max_running: int = 8,
        max_waiting: int = 64,
        max_step_rows: int = 64,
        max_prefill_rows: int = 16,
        runs_beside_host: bool = False,
        runs_ahead: bool = False,
        caches_prefixes: bool = True,
    ) -> None:
        self.runner = FakeRunner(BLOCK_SIZE, max_step_rows)
        self.late = LateSteps(self.runner)
        self.pool = WatchedPool(num_blocks, lambda: self.late.blocks_in_use)
        self.drafts = FakeDrafts(propose)
        self.statistics = Statistics(DRAFT_LENGTH)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerBounds(
                max_running_sequences=max_running,
                max_waiting_sequences=max_waiting,
                max_step_rows=max_step_rows,
                max_prefill_rows=max_prefill_rows,
                block_size=BLOCK_SIZE,
                caches_prefixes=caches_prefixes,
            ),
            on_preempt=self.drafts.stopped,
        )
        plain_steps = FakeSteps(self.runner, runs_beside_host=runs_beside_host)
        self.loop = StepLoop(
            engine=self.late if runs_ahead else plain_steps,
            ahead=self.late if runs_ahead else None,
            scheduler=self.scheduler,
            drafts=self.drafts,
            statistics=self.statistics,
            max_step_rows=max_step_rows,
            activity=lambda name: nullcontext(),
        )
        self.sink = Collector()
        self.set_policy(rules=((1 << 16, DRAFT_LENGTH),))

    def set_policy(
        self, rules: tuple[tuple[int, int], ...], max_decode_rows: int | None = None
    ) -> None:
        self.loop.set_policy(Policy(rules=rules, max_decode_rows=max_decode_rows))

    def admit(
        self,
        sequence_id: int,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        stops: frozenset[int] = frozenset(),
        resumed: Sequence[int] = (),
        override: int | None = None,
        priority: int = 0,
        patience: float = 0.0,
        deadline: float | None = None,
        rules: LogitRules | None = None,
        grammar: Grammar | None = None,
    ) -> None:
        self.loop.admit(
            [
                Request(
                    sink=self.sink,
                    sequence_id=sequence_id,
                    prompt_token_ids=tuple(prompt),
                    resumed_output_token_ids=tuple(resumed),
                    max_tokens=max_tokens,
                    sampling=sampling,
                    stop_token_ids=stops,
                    deadline=deadline,
                    priority=priority,
                    draft_length_override=override,
                    patience_seconds=patience,
                    rules=rules,
                    grammar=grammar,
                )
            ]
        )

    def run(self) -> None:
        for _ in range(10_000):
            if not self.scheduler.has_work:
                break
            self.loop.step()
        assert not self.scheduler.has_work
        assert self.pool.num_used == 0
        assert not self.drafts.live


def no_draft(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    return ()


def right_draft(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    request = sequence.request
    emitted = sequence.committed_length - len(request.prompt_token_ids)
    output = oracle(request.prompt_token_ids, request.sampling, emitted + draft_length)
    return output[emitted:]


def ruled_draft(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    """Mostly right, also under a request's rules."""
    request = sequence.request
    emitted = sequence.committed_length - len(request.prompt_token_ids)
    output = oracle(
        request.prompt_token_ids, request.sampling, emitted + draft_length, rules=request.rules
    )
    return [
        token if random.random() < 0.8 else random.randrange(VOCAB_SIZE)
        for token in output[emitted:]
    ]


def random_draft(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    length = random.randrange(draft_length + 1)
    right = list(right_draft(sequence, length))
    return [token if random.random() < 0.7 else random.randrange(VOCAB_SIZE) for token in right]


GREEDY = Sampling(temperature=0.0)
PROPOSALS = {"no draft": no_draft, "right drafts": right_draft, "random drafts": random_draft}


@pytest.mark.parametrize("name", PROPOSALS)
@pytest.mark.parametrize("num_blocks", [64, 14], ids=["enough blocks", "preemption"])
@pytest.mark.parametrize("runs_beside_host", [False, True])
def test_tokens_are_the_oracles_whatever_is_drafted_and_whoever_joins_or_leaves(
    name: str, num_blocks: int, runs_beside_host: bool
) -> None:
    random.seed(7)
    harness = Harness(PROPOSALS[name], num_blocks=num_blocks, runs_beside_host=runs_beside_host)
    expected = {}
    for sequence_id in range(24):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 40))]
        sampling = Sampling(
            temperature=random.choice([0.0, 0.8, 1.3]),
            top_k=random.choice([0, 5]),
            seed=sequence_id,
        )
        max_tokens = random.randrange(1, 30)
        stops = frozenset(random.sample(range(VOCAB_SIZE), random.randrange(2)))
        expected[sequence_id] = oracle(prompt, sampling, max_tokens, stops)
        harness.admit(sequence_id, prompt, max_tokens, sampling, stops)
        for _ in range(random.randrange(4)):
            harness.set_policy(
                rules=((random.randrange(9), DRAFT_LENGTH), (9, random.randrange(3))),
                max_decode_rows=random.choice([None, 1, 3]),
            )
            if harness.scheduler.has_work:
                harness.loop.step()
    harness.run()
    assert {key: harness.sink.tokens(key) for key in expected} == expected
    assert (harness.scheduler.preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("num_blocks", [64, 14], ids=["enough blocks", "preemption"])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_penalties_and_biases_are_those_of_one_token_after_another(
    num_blocks: int, runs_ahead: bool
) -> None:
    """Beside requests without; a step ahead of the tokens that its rules look at cannot be."""
    random.seed(11)
    harness = Harness(ruled_draft, num_blocks=num_blocks, runs_ahead=runs_ahead)
    expected = {}
    for sequence_id in range(30):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 40))]
        sampling = Sampling(temperature=random.choice([0.0, 0.8]), seed=sequence_id)
        rules = LogitRules(
            presence_penalty=random.choice([0.0, 1.0]),
            frequency_penalty=random.choice([0.0, 0.8]),
            repetition_penalty=random.choice([1.0, 1.4]),
            logit_bias=random.choice([(), ((3, 4.0), (5, -50.0))]),
        )
        given = random.choice([None, None, rules])
        max_tokens = random.randrange(1, 30)
        expected[sequence_id] = oracle(prompt, sampling, max_tokens, rules=given)
        harness.admit(sequence_id, prompt, max_tokens, sampling, rules=given)
        for _ in range(random.randrange(14)):
            harness.set_policy(rules=((9, random.choice([0, 0, DRAFT_LENGTH])),))
            if harness.scheduler.has_work:
                harness.loop.step()
    harness.run()
    assert {key: harness.sink.tokens(key) for key in expected} == expected
    assert harness.statistics.accepted_tokens > 30
    assert (sum(harness.late.rows_ahead) > 0) == runs_ahead


def stopping_draft(sequence: TokenSequence, draft_length: int) -> Sequence[int]:
    """Right, but for the stop token that it wants next but one."""
    return [*ruled_draft(sequence, 1), STOP_TOKEN_ID, *random_draft(sequence, draft_length)][
        :draft_length
    ]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("draft", [no_draft, stopping_draft])
def test_an_output_ends_by_a_stop_token_only_when_it_is_long_enough(
    draft: Propose, runs_ahead: bool
) -> None:
    random.seed(3)
    harness = Harness(draft, num_blocks=20, runs_ahead=runs_ahead)
    if draft is no_draft:
        harness.set_policy(rules=())
    stops = frozenset({STOP_TOKEN_ID, 3, 5, 7})
    expected = {}
    for sequence_id in range(24):
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 20))]
        sampling = Sampling(temperature=random.choice([0.0, 0.8]), seed=sequence_id)
        rules = LogitRules(
            min_tokens=random.randrange(1, 12),
            ending_token_ids=tuple(sorted(stops)),
            # One that stays would keep every step from being launched ahead.
            presence_penalty=0.0 if runs_ahead else random.choice([0.0, 0.5]),
        )
        expected[sequence_id] = oracle(prompt, sampling, 20, stops, rules)
        assert len(expected[sequence_id]) > rules.min_tokens
        resumed = expected[sequence_id][: random.choice([0, 0, 1])]
        harness.admit(sequence_id, prompt, 20, sampling, stops=stops, resumed=resumed, rules=rules)
        expected[sequence_id] = expected[sequence_id][len(resumed) :]
    harness.run()
    assert {key: harness.sink.tokens(key) for key in expected} == expected
    assert min(map(len, expected.values())) < 12  # some were ended by a stop
    # Once they are over, rules are no reason not to run ahead.
    assert (sum(harness.late.rows_ahead) > 0) == (runs_ahead and draft is no_draft)


def test_a_right_draft_is_accepted_whole_in_every_step() -> None:
    harness = Harness(right_draft)
    harness.admit(1, [1, 2, 3], 1 + 5 * (DRAFT_LENGTH + 1), Sampling(temperature=0.9, seed=3))
    harness.run()
    lengths = [len(outcome.emitted_token_ids) for outcome in harness.sink.outcomes[1]]
    assert lengths == [1] + [DRAFT_LENGTH + 1] * 5
    assert harness.statistics.accepted_per_position == [5] * DRAFT_LENGTH


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_stop_token_at_any_place_of_an_accepted_run_ends_the_output_there(cut: int) -> None:
    prompt = [4, 5]
    output = oracle(prompt, GREEDY, 12)
    stop = output[cut - 1]
    expected = output[: output.index(stop) + 1]
    harness = Harness(right_draft)
    harness.admit(1, prompt, 40, GREEDY, frozenset([stop]))
    harness.run()
    assert harness.sink.tokens(1) == expected
    assert harness.sink.finish_reason(1) == generation_pb2.FINISH_REASON_STOP
    for outcome in harness.sink.outcomes[1]:
        assert outcome.accepted_length <= len(outcome.emitted_token_ids)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_kept_to_at_any_place_of_a_draft(max_tokens: int) -> None:
    harness = Harness(right_draft)
    harness.admit(1, [4, 5], max_tokens, GREEDY)
    harness.run()
    assert harness.sink.tokens(1) == oracle([4, 5], GREEDY, max_tokens)
    assert harness.sink.finish_reason(1) == generation_pb2.FINISH_REASON_LENGTH


def test_a_resumed_request_goes_on_where_its_output_ended() -> None:
    sampling = Sampling(temperature=1.1, seed=5)
    whole = oracle([3, 1, 4], sampling, 20)
    harness = Harness(random_draft)
    harness.admit(1, [3, 1, 4], 20, sampling, resumed=whole[:7])
    harness.run()
    assert harness.sink.tokens(1) == whole[7:]


@pytest.mark.parametrize(
    ("threshold", "sequences", "is_drafted"),
    [(None, 4, True), (1, 1, True), (1, 2, False), (3, 3, True), (3, 4, False)],
)
def test_a_step_with_more_decode_rows_than_the_bound_asks_nothing(
    threshold: int | None, sequences: int, is_drafted: bool
) -> None:
    harness = Harness(right_draft)
    harness.set_policy(rules=((64, DRAFT_LENGTH),), max_decode_rows=threshold)
    for sequence_id in range(sequences):
        harness.admit(sequence_id, [sequence_id + 1], 10, GREEDY, override=None)
    for _ in range(3):
        harness.loop.step()
    assert bool(harness.drafts.asks) == is_drafted
    assert (harness.statistics.bypass_steps["threshold"] > 0) == (not is_drafted)
    if not is_drafted:
        assert not any(flush is False for flush in harness.drafts.flushes)


def test_a_request_can_switch_its_own_drafts_off_and_on() -> None:
    harness = Harness(right_draft)
    harness.admit(1, [1], 12, GREEDY, override=0)
    harness.admit(2, [2], 12, GREEDY, override=2)
    harness.run()
    assert not any(outcome.drafted_length for outcome in harness.sink.outcomes[1])
    assert max(outcome.drafted_length for outcome in harness.sink.outcomes[2]) == 2
    assert harness.sink.tokens(1) == oracle([1], GREEDY, 12)


def test_a_long_prompt_is_prefilled_in_chunks_beside_running_sequences() -> None:
    harness = Harness(no_draft)
    harness.admit(1, [1, 2], 30, GREEDY)
    harness.loop.step()
    prompt = [index % VOCAB_SIZE for index in range(60)]
    harness.admit(2, prompt, 5, GREEDY)
    harness.run()
    assert [1, 16] in harness.runner.rows_of_steps
    assert harness.sink.tokens(1) == oracle([1, 2], GREEDY, 30)
    assert harness.sink.tokens(2) == oracle(prompt, GREEDY, 5)


def test_every_step_of_a_long_prefill_is_reported_before_the_first_token() -> None:
    harness = Harness(no_draft, max_step_rows=16)
    harness.admit(1, [index % VOCAB_SIZE for index in range(60)], 5, GREEDY)
    for _ in range(3):
        harness.loop.step()
    assert [step.prefill_tokens for step in harness.sink.steps] == [16, 16, 16]
    assert 1 not in harness.sink.outcomes
    harness.run()
    assert sum(step.prefill_tokens for step in harness.sink.steps) == 60
    assert len(harness.sink.tokens(1)) == 5


def test_a_full_queue_rejects_and_a_draining_target_rejects() -> None:
    harness = Harness(no_draft, max_running=1, max_waiting=2)
    for sequence_id in range(3):
        harness.admit(sequence_id, [1], 3, GREEDY)
    assert harness.sink.rejected == {2: target_pb2.REJECT_REASON_OVERLOADED}
    harness.loop.stop_admitting()
    harness.admit(9, [1], 3, GREEDY)
    assert harness.sink.rejected[9] == target_pb2.REJECT_REASON_DRAINING
    harness.run()
    assert len(harness.sink.tokens(1)) == 3


def test_cancelling_frees_everything_and_leaves_the_others_alone() -> None:
    harness = Harness(random_draft, max_running=2)
    for sequence_id in range(4):
        harness.admit(sequence_id, [sequence_id + 1] * 9, 20, GREEDY)
    for _ in range(3):
        harness.loop.step()
    harness.loop.cancel(harness.sink, frozenset([0, 3]))
    harness.run()
    assert 3 not in harness.sink.outcomes
    assert len(harness.sink.tokens(0)) < 20
    assert harness.sink.tokens(1) == oracle([2] * 9, GREEDY, 20)
    assert harness.sink.tokens(2) == oracle([3] * 9, GREEDY, 20)


def test_a_report_is_written_while_the_next_step_runs_where_that_costs_nothing() -> None:
    harness = Harness(right_draft, runs_beside_host=True)
    harness.set_policy(rules=((1 << 16, 0),))
    harness.admit(1, [1, 2, 3], 12, GREEDY)

    def reported() -> int:
        return len(harness.sink.outcomes.get(1, ()))

    assert [(harness.loop.step(), reported())[1] for _ in range(3)] == [0, 1, 2]
    # The draft service is asked behind this step: its time is free as well.
    harness.set_policy(rules=((1 << 16, 2),))
    harness.loop.step()
    assert reported() == 4
    harness.run()
    assert harness.sink.tokens(1) == oracle([1, 2, 3], GREEDY, 12)


def test_what_was_decoded_is_reported_before_a_sequence_is_cancelled() -> None:
    harness = Harness(no_draft, runs_beside_host=True)
    harness.set_policy(rules=((1 << 16, 0),))
    for sequence_id in (1, 2):
        harness.admit(sequence_id, [sequence_id], 9, GREEDY)
    for _ in range(4):
        harness.loop.step()
    harness.loop.cancel(harness.sink, frozenset([1]))
    assert harness.sink.tokens(1) == oracle([1], GREEDY, 9)[:4]
    harness.run()
    assert len(harness.sink.tokens(1)) == 4
    assert harness.sink.tokens(2) == oracle([2], GREEDY, 9)


def test_a_higher_priority_is_admitted_first() -> None:
    harness = Harness(no_draft, max_running=1)
    for sequence_id, priority in [(1, 0), (2, 0), (3, 5)]:
        harness.admit(sequence_id, [1], 2, GREEDY, priority=priority)
    harness.run()
    assert list(harness.sink.outcomes) == [3, 1, 2]


def test_drafts_never_make_a_step_larger_than_its_bound() -> None:
    harness = Harness(right_draft, max_running=8, max_step_rows=16)
    for sequence_id in range(8):
        harness.admit(sequence_id, [sequence_id + 1], 20, GREEDY)
    harness.run()
    assert max(sum(rows) for rows in harness.runner.rows_of_steps) <= 16


def test_a_one_token_prompt_that_joins_after_the_drafts_were_asked_for_keeps_the_rows_bounded() -> (
    None
):
    harness = Harness(right_draft, max_running=8, max_step_rows=16)
    for sequence_id in range(3):
        harness.admit(sequence_id, [1, 2, sequence_id], 40, GREEDY)
    for _ in range(3):
        harness.loop.step()
    assert harness.drafts.asks
    for sequence_id in range(3, 8):
        harness.admit(sequence_id, [sequence_id], 10, GREEDY)
    harness.run()
    for sequence_id in range(3, 8):
        assert harness.sink.tokens(sequence_id) == oracle([sequence_id], GREEDY, 10)


def test_no_draft_costs_another_sequence_its_place() -> None:
    def preemptions(propose: Propose) -> int:
        # Three blocks for two sequences of 8 tokens that both need a second block.
        harness = Harness(propose, num_blocks=5)
        for sequence_id in range(2):
            harness.admit(sequence_id, [sequence_id + 1] * 7, 9, GREEDY)
        harness.run()
        return harness.scheduler.preemptions

    assert preemptions(no_draft) == preemptions(right_draft) == 0


def test_the_least_important_sequence_is_preempted_first() -> None:
    harness = Harness(no_draft, num_blocks=8)
    harness.admit(1, [1] * 15, 20, GREEDY)
    harness.loop.step()
    harness.admit(2, [2] * 15, 20, GREEDY, priority=100)
    harness.run()
    assert harness.scheduler.preemptions > 0
    # The important one was never computed again: its prompt was prefilled once.
    steps = [
        outcome.sequence_id for outcomes in harness.sink.outcomes.values() for outcome in outcomes
    ]
    assert steps.count(2) == 20
    assert harness.sink.tokens(1) == oracle([1] * 15, GREEDY, 20)


def test_patience_is_the_least_patient_sequences_and_nobody_elses() -> None:
    harness = Harness(right_draft)
    harness.admit(1, [1], 30, GREEDY, patience=5.0)
    harness.loop.step()
    harness.loop.step()
    assert harness.drafts.patience[-1] == 5.0
    harness.admit(2, [2], 30, GREEDY, override=0)
    harness.loop.step()
    assert harness.drafts.patience[-1] == 0.0


def test_cancelled_sequences_are_told_to_the_draft_service_even_after_a_bypass() -> None:
    harness = Harness(right_draft)
    harness.set_policy(rules=((64, DRAFT_LENGTH),), max_decode_rows=1)
    for sequence_id in range(2):
        harness.admit(sequence_id, [sequence_id + 1], 20, GREEDY)
    for _ in range(3):
        harness.loop.step()
    assert harness.drafts.flushes[-1] is True
    harness.loop.cancel(harness.sink)
    harness.loop.submit(stop_running)
    with pytest.raises(StopRunning):
        harness.loop.run()
    assert harness.drafts.flushes[-1] is False


class StopRunning(Exception):
    """Ends a loop that runs for ever."""


def stop_running(loop: StepLoop) -> None:
    """Lets the loop pass once through its idle branch, then ends it."""

    def stop(loop: StepLoop) -> None:
        raise StopRunning

    threading.Timer(0.1, loop.submit, (stop,)).start()


def test_prompt_chunks_beside_running_streams_get_shorter_the_further_they_are() -> None:
    harness = Harness(no_draft, num_blocks=1000, max_step_rows=512, max_prefill_rows=256)
    harness.admit(1, [1] * 4000, 1, GREEDY)
    (sequence,) = harness.scheduler.start_waiting()

    def next_chunk(cached_length: int, decode_rows: int) -> int:
        sequence.cached_length = cached_length
        (chunk,) = harness.scheduler.prefill_chunks(decode_rows)
        return chunk.length

    assert [next_chunk(cached, 1) for cached in (0, 1024, 2048, 3072)] == [256, 128, 85, 64]
    assert next_chunk(3072, 0) == 512
