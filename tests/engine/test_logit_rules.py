"""Penalties and biases against a loop over tokens, and what a draft's positions see of them."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.host_verdict import verdict_of
from outrider.engine.logit_rules import LogitRules, RuledText
from outrider.engine.sampling import Sampling, sample
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import SequenceStep

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=20)


def one_by_one(
    logits: np.ndarray, rules: LogitRules, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """The definition, token by token, in float32."""
    changed = []
    biases = dict(rules.logit_bias)
    for token_id, logit in enumerate(logits):
        if token_id in prompt or token_id in output:
            penalty = np.float32(rules.repetition_penalty)
            logit = logit / penalty if logit > 0 else logit * penalty
        if token_id in output:
            logit = logit - np.float32(rules.presence_penalty)
            logit = logit - np.float32(rules.frequency_penalty) * np.float32(output.count(token_id))
        changed.append(logit + np.float32(biases.get(token_id, 0.0)))
    return changed


@given(
    prompt=TOKENS,
    output=TOKENS,
    presence=st.sampled_from([-2.0, 0.0, 0.7]),
    frequency=st.sampled_from([-0.3, 0.0, 2.0]),
    repetition=st.sampled_from([0.5, 1.0, 1.3]),
    biases=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=4),
    seed=st.integers(0, 99),
)
def test_rules_are_those_of_the_definition(
    prompt: list[int],
    output: list[int],
    presence: float,
    frequency: float,
    repetition: float,
    biases: dict[int, float],
    seed: int,
) -> None:
    logits = np.random.default_rng(seed).normal(scale=3, size=VOCABULARY).astype(np.float32)
    before = logits.copy()
    rules = LogitRules(
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=tuple(sorted(biases.items())),
    )
    found = rules.apply(logits, prompt, output)
    assert found.dtype == np.float32
    assert found.tolist() == one_by_one(logits, rules, prompt, output)
    assert np.array_equal(logits, before)


def test_neutral_rules_are_known() -> None:
    assert LogitRules().are_neutral
    assert not LogitRules(repetition_penalty=1.1).are_neutral
    assert not LogitRules(logit_bias=((0, 0.0),)).are_neutral


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_each_position_of_a_draft_sees_the_tokens_before_it_and_no_others(
    temperature: float, num_right: int
) -> None:
    """Drawn one after another, a token at a time, as without a draft."""
    logits = np.random.default_rng(5).normal(scale=0.3, size=(4, VOCABULARY)).astype(np.float32)
    rules = LogitRules(frequency_penalty=1.5, presence_penalty=0.5, logit_bias=((3, 2.0),))
    sampling = Sampling(temperature=temperature, seed=11)
    prompt, output = [1, 2, 3], [4, 4, 5]
    tokens: list[int] = []
    for index in range(4):
        row = rules.apply(logits[index], prompt, [*output, *tokens])
        tokens.append(sample(row, sampling, 6 + index))
    # The rules matter: without them the tokens are others.
    assert tokens != [sample(row, sampling, 6 + index) for index, row in enumerate(logits)]
    drafts = (tokens[:num_right] + [(tokens[num_right] + 1) % VOCABULARY] * 3)[:3]
    step = SequenceStep(
        rows=SequenceRows(token_ids=[output[-1], *drafts], start=5, block_table=[1], num_logits=4),
        draft_length=3,
        sampling=sampling,
        base_length=6,
        ruled=RuledText(rules=rules, prompt=prompt, output=output),
    )
    verdict = verdict_of(step, logits)
    assert verdict.accepted_length == num_right
    assert verdict.emitted_token_ids(drafts) == tokens[: num_right + 1]


class NoRepeats:
    """A constraint: no token of the output so far comes again."""

    failure = None

    def allowed(self, output: Sequence[int]) -> np.ndarray:
        allowed = np.ones(VOCABULARY, dtype=np.bool_)
        allowed[list(output)] = False
        return allowed


@pytest.mark.parametrize("rules", [LogitRules(), LogitRules(frequency_penalty=-2.0)])
def test_a_constraint_forbids_at_each_position_behind_the_tokens_before_it(
    rules: LogitRules,
) -> None:
    """The logits say the same token everywhere; under the constraint it comes once."""
    logits = np.tile(np.arange(VOCABULARY, dtype=np.float32), (4, 1))
    last = VOCABULARY - 1
    ruled = RuledText(rules=rules, prompt=[last], output=[1], constraint=NoRepeats())
    for drafts, num_right in (
        ([last, last - 1, last - 2], 3),
        ([last, last, last - 2], 1),
        ([1, last, last - 1], 0),
    ):
        step = SequenceStep(
            rows=SequenceRows(token_ids=[1, *drafts], start=1, block_table=[1], num_logits=4),
            draft_length=3,
            sampling=Sampling(temperature=0.0),
            base_length=2,
            ruled=ruled,
        )
        verdict = verdict_of(step, logits)
        assert verdict.accepted_length == num_right
        expected = [last - index for index in range(num_right + 1)]
        assert verdict.emitted_token_ids(drafts) == expected
    assert np.isfinite(logits).all()


def test_what_ends_an_output_cannot_be_drawn_before_it_is_long_enough() -> None:
    logits = np.zeros(VOCABULARY, dtype=np.float32)
    rules = LogitRules(min_tokens=3, ending_token_ids=(1, 4), logit_bias=((4, 50.0),))
    for length in range(6):
        found = rules.apply(logits, [0], [2] * length)
        forbidden = np.flatnonzero(np.isneginf(found)).tolist()
        assert forbidden == ([1, 4] if length < 3 else [])
        assert (found[4] == 50.0) == (length >= 3)


def test_rules_that_are_over_change_nothing_more() -> None:
    short = LogitRules(min_tokens=3, ending_token_ids=(1,))
    assert [short.change(length) for length in (0, 2, 3, 9)] == [True, True, False, False]
    assert LogitRules(min_tokens=3, ending_token_ids=(1,), presence_penalty=0.1).change(9)
    assert not short.are_neutral
