"""The standalone drafter over a model whose every logit shows what lay in its cache."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from fake_runner import VOCAB_SIZE, FakeRunner, continued, logits_of, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_guide import ScriptedGuide

from draft_service.drafters.drafter import Wish
from draft_service.drafters.pace import MAX_BACKLOG
from draft_service.drafters.standalone import StandaloneDrafter, StandaloneSequence
from outrider.engine.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=17)
# (rows, seconds) of a forward, as boot would measure them.
STEP_SECONDS = ((1, 0.010), (8, 0.011), (16, 0.014), (64, 0.040))
NEVER = float("inf")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def drafter_over(
    runner: FakeRunner, num_blocks: int = 400, eos_token_ids: Sequence[int] = (), **settings: object
) -> StandaloneDrafter:
    return StandaloneDrafter(
        runner=runner,
        block_pool=pool_of(num_blocks),
        eos_token_ids=frozenset(eos_token_ids),
        fingerprint="fake",
        step_seconds=STEP_SECONDS,
        **settings,
    )


def opened(
    drafter: StandaloneDrafter, token_ids: Sequence[int], sampling: Sampling = GREEDY
) -> StandaloneSequence:
    state = drafter.open(array("i", token_ids), sampling)
    prepare(drafter, state)
    return state


def prepare(drafter: StandaloneDrafter, *states: StandaloneSequence) -> None:
    for state in states:
        assert drafter.reserve(state, len(state.token_ids))
    while any(drafter.backlog(state) for state in states):
        drafter.prepare(states, 0.040)


def proposed(
    drafter: StandaloneDrafter, wishes: Sequence[Wish[StandaloneSequence]]
) -> list[list[int]]:
    return [proposal.token_ids for proposal in drafter.propose(wishes)]


def propose(drafter: StandaloneDrafter, state: StandaloneSequence, draft_length: int) -> list[int]:
    assert drafter.reserve(state, len(state.token_ids) + draft_length)
    return proposed(drafter, [Wish(state, draft_length, NEVER)])[0]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_drafter_with_the_targets_weights_has_every_token_right(sampling: Sampling) -> None:
    runner = FakeRunner(seed=5)
    drafter = drafter_over(runner)
    states = [opened(drafter, prompt, sampling) for prompt in (PROMPT, PROMPT[:3], [7] * 30)]
    for draft_length in (1, 4, 3, 8, 2):
        runner.forwards.clear()
        for state in states:
            assert drafter.reserve(state, len(state.token_ids) + draft_length)
        drafts = proposed(drafter, [Wish(state, draft_length, NEVER) for state in states])
        # One forward per draft position, for all rows together.
        assert len(runner.forwards) == draft_length
        assert all(len(forward) == len(states) for forward in runner.forwards)
        # Of what was accepted only the last token's keys and the bonus token's are new.
        assert all(rows <= 2 for _, rows in runner.forwards[0])
        for state, draft in zip(states, drafts, strict=True):
            expected = continued(5, state.token_ids, sampling, draft_length + 1)
            assert draft == expected[:-1]
            state.token_ids.extend(expected)


# What a target does to a sequence between two proposals.
turns = st.lists(
    st.tuples(
        st.integers(0, 2),  # sequence
        st.integers(0, 6),  # draft length; 0 = commit only
        st.integers(0, 6),  # tokens of the draft that are accepted, at most
        st.integers(0, VOCAB_SIZE - 1),  # bonus token
        st.integers(0, 25),  # further tokens that are committed without drafts
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(turns=turns)
def test_whatever_is_accepted_a_draft_is_that_of_a_drafter_that_saw_the_text_afresh(
    turns: list[tuple[int, int, int, int, int]],
) -> None:
    drafter = drafter_over(FakeRunner(seed=1))
    samplings = (GREEDY, SAMPLED, Sampling(temperature=1.5, seed=3))
    states = [
        opened(drafter, prompt, sampling)
        for prompt, sampling in zip((PROMPT, [0], [8] * 17), samplings, strict=True)
    ]
    for index, draft_length, accepted_length, bonus_token_id, others in turns:
        state = states[index]
        if len(state.token_ids) + draft_length + others + 8 > 400:
            continue
        draft = []
        if draft_length:
            if drafter.backlog(state) > MAX_BACKLOG:
                prepare(drafter, state)
            draft = propose(drafter, state, draft_length)
            expected = continued(1, state.token_ids, state.sampling, draft_length)
            assert draft == expected
        state.token_ids.extend([*draft[:accepted_length], bonus_token_id, *range(others)])


def test_the_same_draft_comes_again_when_asked_again() -> None:
    drafter = drafter_over(FakeRunner())
    state = opened(drafter, PROMPT, SAMPLED)
    assert propose(drafter, state, 5) == propose(drafter, state, 5)
    assert propose(drafter, state, 2) == continued(0, PROMPT, SAMPLED, 2)


def test_prefill_comes_in_pieces_of_bounded_size() -> None:
    runner = FakeRunner()
    drafter = drafter_over(runner)
    states = [drafter.open(array("i", [index] * 130), GREEDY) for index in range(2)]
    prepare(drafter, *states)
    assert [sum(rows for _, rows in forward) for forward in runner.forwards] == [64] * 4 + [4]


@pytest.mark.parametrize(
    ("seconds", "rows"), [(0.001, 8), (0.012, 8), (0.02, 16), (0.04, 64), (0.08, 128), (9, 512)]
)
def test_a_piece_has_the_rows_that_its_budget_allows(seconds: float, rows: int) -> None:
    assert drafter_over(FakeRunner()).rows_within(seconds) == rows


@pytest.mark.parametrize(("patience", "length"), [(0.0, 1), (0.019, 1), (0.022, 2), (0.05, 4)])
def test_a_draft_is_as_long_as_its_time_allows(patience: float, length: int) -> None:
    runner = FakeRunner()
    # Every forward takes 10 ms.
    drafter = drafter_over(runner, clock=lambda: 5 + 0.01 * len(runner.forwards))
    states = [opened(drafter, PROMPT) for _ in range(2)]
    for state in states:
        assert drafter.reserve(state, len(PROMPT) + 8)
    now = 5 + 0.01 * len(runner.forwards)
    drafts = proposed(drafter, [Wish(states[0], 8, now + patience), Wish(states[1], 8, NEVER)])
    assert drafts == [continued(0, PROMPT, GREEDY, count) for count in (length, 8)]


def test_more_rows_than_a_step_takes_are_run_in_several_steps() -> None:
    runner = FakeRunner(max_step_rows=8)
    drafter = drafter_over(runner)
    states = [opened(drafter, [index] * 5) for index in range(4)]
    for state in states:
        state.token_ids.extend([1, 2, 3])
        assert drafter.reserve(state, 11)
    drafts = proposed(drafter, [Wish(state, 3, NEVER) for state in states])
    assert drafts == [continued(0, state.token_ids, GREEDY, 3) for state in states]


def test_a_draft_stops_behind_an_end_token() -> None:
    draft = continued(0, PROMPT, GREEDY, 6)
    drafter = drafter_over(FakeRunner(), eos_token_ids=[draft[2]])
    end = draft.index(draft[2]) + 1
    assert propose(drafter, opened(drafter, PROMPT), 6) == draft[:end]


def test_blocks_run_out_for_one_sequence_only_and_come_back_when_it_is_closed() -> None:
    runner = FakeRunner()
    drafter = drafter_over(runner, num_blocks=4)
    first = opened(drafter, [1] * 8)
    second = opened(drafter, [2] * 8)
    assert not drafter.reserve(second, 9)
    drafter.close(second)
    assert propose(drafter, first, 4) == continued(0, [1] * 8, GREEDY, 4)
    drafter.close(first)
    again = opened(drafter, [3] * 16)
    drafter.close(again)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_draft_goes_on_from_what_the_guide_chose(sampling: Sampling) -> None:
    drafter = drafter_over(FakeRunner())
    state, other = opened(drafter, PROMPT, sampling), opened(drafter, PROMPT, sampling)
    assert drafter.reserve(state, len(PROMPT) + 5)
    assert drafter.reserve(other, len(PROMPT) + 5)
    own = continued(0, PROMPT, sampling, 5)
    replaced = [*own[:2], (own[2] + 1) % VOCAB_SIZE]
    guide = ScriptedGuide({2: replaced[2]})
    wishes = [Wish(state, 5, NEVER, guide), Wish(other, 5, NEVER)]
    draft, unguided = proposed(drafter, wishes)
    assert draft == replaced + continued(0, PROMPT + replaced, sampling, 2)
    assert unguided == own
    assert [asked[0] for asked in guide.asked] == [draft[:offset] for offset in range(5)]
    assert [asked[1] for asked in guide.asked] == [*own[:3], *draft[3:]]
    for drafted, token_id, probability in guide.asked:
        scaled = np.float64(logits_of(0, PROMPT + drafted)) / (sampling.temperature or 1)
        weights = np.exp(scaled - scaled.max())
        assert probability == pytest.approx(weights[token_id] / weights.sum(), rel=1e-4)
    # What was drafted so is in the cache, and of use once it is committed.
    state.token_ids.extend(draft[:4])
    assert drafter.backlog(state) == 0
    assert propose(drafter, state, 3) == continued(0, PROMPT + draft[:4], sampling, 3)


def test_an_end_token_that_the_guide_chose_ends_the_draft() -> None:
    drafter = drafter_over(FakeRunner(), eos_token_ids=[49])
    state = opened(drafter, PROMPT)
    assert drafter.reserve(state, len(PROMPT) + 5)
    (draft,) = proposed(drafter, [Wish(state, 5, NEVER, ScriptedGuide({1: 49}))])
    assert draft == [*continued(0, PROMPT, GREEDY, 1), 49]
