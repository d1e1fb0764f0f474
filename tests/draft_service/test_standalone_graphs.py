"""The standalone drafter whose drafts are whole chains, over a model whose every logit shows what
lay in its cache.
"""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from fake_runner import BLOCK_SIZE, VOCAB_SIZE, FakeRunner, continued, pool_of
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.drafter import Wish
from draft_service.drafters.standalone_graphs import StandaloneGraphDrafter
from draft_service.drafters.standalone_sequence import StandaloneSequence
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.step_chain import StepChain
from outrider.engine.sampling import Sampling, sample
from outrider.engine.step import SequenceRows

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=17)
NEVER = float("inf")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MAX_DRAFT_LENGTH = 6


class FakeChains:
    """StepChains on a FakeRunner: one forward per position, of those whose draft goes on."""

    def __init__(self, runner: FakeRunner, max_sequences: int = 2) -> None:
        self.runner = runner
        self.most_sequences = 0
        self.bounds = StepBounds(
            block_size=BLOCK_SIZE,
            max_sequence_length=runner.max_sequence_length,
            max_step_rows=16,
            max_sequences=max_sequences,
            max_draft_length=MAX_DRAFT_LENGTH,
        )

    def draft(self, chains: Sequence[StepChain]) -> list[list[int]]:
        assert 0 < len(chains) <= self.bounds.max_sequences
        self.most_sequences = max(self.most_sequences, len(chains))
        drafts: list[list[int]] = [[] for _ in chains]
        for chain in chains:
            assert 0 < len(chain.rows.token_ids) <= MAX_DRAFT_LENGTH + 1
            assert chain.rows.num_logits == len(chain.rows.token_ids)
        for step in range(max(chain.draft_length for chain in chains)):
            going = [index for index, chain in enumerate(chains) if chain.draft_length > step]
            batch = [
                self._row(chains[index], drafts[index]) if step else chains[index].rows
                for index in going
            ]
            assert sum(len(rows.token_ids) for rows in batch) <= self.bounds.max_step_rows
            logits = self.runner.forward(batch)
            ends = np.cumsum([rows.num_logits for rows in batch])
            for index, rows, end in zip(going, batch, ends, strict=True):
                position = rows.start + len(rows.token_ids)
                drafts[index].append(sample(logits[end - 1], chains[index].sampling, position))
        return drafts

    def extend(self, batch: Sequence[SequenceRows]) -> None:
        assert sum(len(rows.token_ids) for rows in batch) <= self.bounds.max_step_rows
        assert all(rows.num_logits == 0 for rows in batch)
        self.runner.forward(batch)

    def _row(self, chain: StepChain, draft: list[int]) -> SequenceRows:
        return SequenceRows(
            token_ids=draft[-1:],
            start=chain.length + len(draft) - 1,
            block_table=chain.rows.block_table,
            num_logits=1,
        )


def drafter_over(
    chains: FakeChains, num_blocks: int = 400, eos_token_ids: Sequence[int] = ()
) -> StandaloneGraphDrafter:
    return StandaloneGraphDrafter(
        chains=chains,
        block_pool=pool_of(num_blocks),
        eos_token_ids=frozenset(eos_token_ids),
        fingerprint="fake",
        step_seconds=((1, 0.010), (16, 0.014)),
    )


def opened(
    drafter: StandaloneGraphDrafter, token_ids: Sequence[int], sampling: Sampling = GREEDY
) -> StandaloneSequence:
    state = drafter.open(array("i", token_ids), sampling)
    assert drafter.reserve(state, len(token_ids))
    while drafter.backlog(state):
        drafter.prepare([state], 1.0)
    return state


def propose(
    drafter: StandaloneGraphDrafter, states: Sequence[StandaloneSequence], draft_length: int
) -> list[list[int]]:
    for state in states:
        # As the draft service does: whatever of a draft is not run needs no block.
        assert drafter.reserve(state, len(state.token_ids) + draft_length)
    wishes = [Wish(state, draft_length, NEVER) for state in states]
    return [proposal.token_ids for proposal in drafter.propose(wishes)]


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_drafter_with_the_targets_weights_has_every_token_right(sampling: Sampling) -> None:
    chains = FakeChains(FakeRunner(seed=5))
    drafter = drafter_over(chains)
    states = [opened(drafter, prompt, sampling) for prompt in (PROMPT, PROMPT[:3], [7] * 30)]
    for draft_length in (1, 4, 3, 6, 2):
        chains.runner.forwards.clear()
        drafts = propose(drafter, states, draft_length)
        # Three sequences by graphs of two; of what was accepted two tokens at most are new.
        assert len(chains.runner.forwards) == 2 * draft_length
        assert all(rows <= 2 for forward in chains.runner.forwards for _, rows in forward)
        for state, draft in zip(states, drafts, strict=True):
            expected = continued(5, state.token_ids, sampling, draft_length + 1)
            assert draft == expected[:-1]
            state.token_ids.extend(expected)
    assert chains.most_sequences == 2


# What a target does to a sequence between two proposals.
turns = st.lists(
    st.tuples(
        st.integers(0, 2),  # sequence
        st.integers(0, MAX_DRAFT_LENGTH),  # draft length; 0 = commit only
        st.integers(0, MAX_DRAFT_LENGTH),  # tokens of the draft that are accepted, at most
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
    drafter = drafter_over(FakeChains(FakeRunner(seed=1)))
    samplings = (GREEDY, SAMPLED, Sampling(temperature=1.5, seed=3))
    states = [
        opened(drafter, prompt, sampling)
        for prompt, sampling in zip((PROMPT, [0], [8] * 17), samplings, strict=True)
    ]
    for index, draft_length, accepted_length, bonus_token_id, others in turns:
        state = states[index]
        if len(state.token_ids) + draft_length + others + 8 > 400:
            continue
        draft: list[int] = []
        if draft_length:
            (draft,) = propose(drafter, [state], draft_length)
            assert draft == continued(1, state.token_ids, state.sampling, draft_length)
        state.token_ids.extend([*draft[:accepted_length], bonus_token_id, *range(others)])


def test_drafts_of_different_lengths_come_from_one_chain() -> None:
    drafter = drafter_over(FakeChains(FakeRunner()))
    states = [opened(drafter, PROMPT), opened(drafter, PROMPT[:5], SAMPLED)]
    for state, length in zip(states, (2, 5), strict=True):
        assert drafter.reserve(state, len(state.token_ids) + length)
    proposals = drafter.propose([Wish(states[0], 2, NEVER), Wish(states[1], 5, NEVER)])
    assert proposals[0].token_ids == continued(0, PROMPT, GREEDY, 2)
    assert proposals[1].token_ids == continued(0, PROMPT[:5], SAMPLED, 5)


def test_the_same_draft_comes_again_when_asked_again() -> None:
    drafter = drafter_over(FakeChains(FakeRunner()))
    state = opened(drafter, PROMPT, SAMPLED)
    assert propose(drafter, [state], 5) == propose(drafter, [state], 5)
    assert propose(drafter, [state], 2) == [continued(0, PROMPT, SAMPLED, 2)]


def test_a_draft_ends_behind_an_end_token() -> None:
    draft = continued(0, PROMPT, GREEDY, 5)
    drafter = drafter_over(FakeChains(FakeRunner()), eos_token_ids=[draft[2]])
    assert propose(drafter, [opened(drafter, PROMPT)], 5) == [draft[: draft.index(draft[2]) + 1]]


def test_without_blocks_a_sequence_is_refused_and_closing_one_makes_room() -> None:
    drafter = drafter_over(FakeChains(FakeRunner()), num_blocks=3)
    state = opened(drafter, PROMPT)
    other = drafter.open(array("i", PROMPT), GREEDY)
    assert not drafter.reserve(other, len(PROMPT))
    drafter.close(state)
    assert drafter.reserve(other, len(PROMPT))
