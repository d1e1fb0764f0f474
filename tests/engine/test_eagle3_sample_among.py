"""Drawing from some of the vocabulary's tokens is drawing from all with the others left out."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling import LogitsError, Sampling, sample, sample_among

VOCAB_SIZE = 300

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.2]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=150, deadline=None)
@given(
    sampling=samplings,
    position=st.integers(0, 10_000),
    count=st.integers(1, VOCAB_SIZE),
    seed=st.integers(0, 10_000),
    are_tied=st.booleans(),
)
def test_the_token_is_that_of_a_row_with_minus_infinity_elsewhere(
    sampling: Sampling, position: int, count: int, seed: int, are_tied: bool
) -> None:
    random = np.random.default_rng(seed)
    token_ids = np.sort(random.permutation(VOCAB_SIZE)[:count])
    logits = (3 * random.standard_normal(count)).astype(np.float32)
    if are_tied:
        logits = np.round(logits)
    everywhere = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
    everywhere[token_ids] = logits
    drawn = token_ids[sample_among(logits, token_ids, sampling, position)]
    assert drawn == sample(everywhere, sampling, position)


def test_noise_follows_the_token_not_its_place() -> None:
    sampling = Sampling(temperature=1.0, seed=5)
    flat = np.zeros(VOCAB_SIZE, dtype=np.float32)
    token_ids = np.arange(VOCAB_SIZE)
    for position in range(20):
        first = int(sample_among(flat, token_ids, sampling, position))
        assert first == sample(flat, sampling, position)
        # The winner keeps its noise when tokens before it are taken out.
        later = token_ids[first // 2 :]
        assert later[sample_among(flat[first // 2 :], later, sampling, position)] == first


def test_a_row_that_defines_no_distribution_is_refused() -> None:
    logits = np.array([1.0, np.nan], dtype=np.float32)
    with pytest.raises(LogitsError, match="nan"):
        sample_among(logits, np.array([3, 9]), Sampling(temperature=1.0), 0)
