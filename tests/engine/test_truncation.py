import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling import Sampling, processed_log_probabilities

TRUNCATIONS = [
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.9},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.08},
]


def probabilities_by_definition(logits: np.ndarray, sampling: Sampling) -> list[float]:
    """Temperature, top-k, top-p and min-p as one would explain them, one token at a time."""
    largest = max(logits.tolist())
    weights = [math.exp((x - largest) / sampling.temperature) for x in logits.tolist()]
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    if sampling.top_k:
        order = order[: sampling.top_k]
    if sampling.top_p < 1:
        total = sum(weights[token_id] for token_id in order)
        head, mass = [], 0.0
        for token_id in order:
            head.append(token_id)
            mass += weights[token_id]
            if mass >= sampling.top_p * total:
                break
        order = head
    order = [token_id for token_id in order if weights[token_id] >= sampling.min_p]
    total = sum(weights[token_id] for token_id in order)
    return [weights[i] / total if i in order else 0.0 for i in range(len(weights))]


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5000001, 2.0, -math.inf]), max_size=12),
    st.sampled_from([0.25, 1.0, 3.0]),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.31, 0.62, 0.87, 0.993, 1.0]),
    st.sampled_from([0.0, 0.013, 0.29, 1.0]),
)
def test_truncations_leave_what_their_definition_says_and_ties_go_to_low_ids(
    values: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = np.array([0.25, *values], dtype=np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probabilities = np.exp(processed_log_probabilities(logits, sampling))
    assert probabilities == pytest.approx(probabilities_by_definition(logits, sampling))


def test_truncations_of_long_rows_leave_what_their_definition_says() -> None:
    rng = np.random.default_rng(3)
    for spread in (0.0, 0.2, 2.0, 6.0):
        logits = (rng.normal(size=5000) * spread).round(2).astype(np.float32)
        for truncation in TRUNCATIONS:
            sampling = Sampling(**truncation)
            kept = np.isfinite(processed_log_probabilities(logits, sampling))
            expected = np.array(probabilities_by_definition(logits, sampling)) > 0
            # Sums in another order may move the end of a flat head by a token.
            assert np.count_nonzero(kept != expected) <= (1 if spread < 1 else 0), sampling


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0, 4.0, 8.0])
def test_top_p_sorts_enough_of_the_row_whatever_the_mass_asked_for(spread: float) -> None:
    logits = (np.random.default_rng(9).normal(size=4000) * spread).astype(np.float32)
    weights = np.exp((logits - logits.max()).astype(np.float64))
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order])
    for top_p in np.linspace(0.01, 0.9999, 150).tolist():
        kept = np.isfinite(processed_log_probabilities(logits, Sampling(top_p=top_p)))
        count = int(np.count_nonzero(reached < top_p * reached[-1])) + 1
        assert np.array_equal(np.flatnonzero(kept), np.sort(order[:count])), top_p
