import itertools
import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.noise import gumbel
from outrider.engine.sampling import (
    MIN_TEMPERATURE,
    LogitsError,
    Sampling,
    processed_log_probabilities,
    sample,
)

VOCABULARY_SIZE = 49_152
SMALL = np.array(
    [1.0, -2.0, 0.5, 0.5, 3.0, -0.7, 2.2, 0.0, -1.0, 1.5, 2.9, -4.0, 0.5, 0.1, -0.3, 1.9],
    dtype=np.float32,
)
TRUNCATIONS = [
    {},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 8, "top_p": 0.9},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.08},
]


def chi_square_bound(degrees: int) -> float:
    """The value exceeded with probability 1e-4 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


def sample_by_definition(logits: np.ndarray, sampling: Sampling, position: int) -> int:
    """Gumbel-max in float64 over the whole row, with no shortcut."""
    kept = np.isfinite(processed_log_probabilities(logits, sampling))
    scores = logits.astype(np.float64) / sampling.temperature
    scores += gumbel(sampling.seed, position, np.arange(len(logits)))
    return int(np.where(kept, scores, -np.inf).argmax())


def assert_follows(counts: np.ndarray, probabilities: np.ndarray, what: object) -> None:
    assert counts[probabilities == 0].sum() == 0, what
    possible = probabilities > 0
    if possible.sum() == 1:
        return
    expected = probabilities[possible] * counts.sum()
    # Cells with few expected draws are pooled, as the test's approximation needs.
    rare = expected < 5
    observed = counts[possible]
    if rare.any():
        observed = np.append(observed[~rare], observed[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    value = float(((observed - expected) ** 2 / expected).sum())
    assert value < chi_square_bound(len(expected) - 1), (what, value)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_sampled_tokens_follow_the_exact_distribution(
    temperature: float, truncation: dict[str, float]
) -> None:
    count = 4000
    sampling = Sampling(temperature=temperature, seed=2024, **truncation)
    probabilities = np.exp(processed_log_probabilities(SMALL, sampling))
    across_positions = [sample(SMALL, sampling, position) for position in range(count)]
    across_seeds = [
        sample(SMALL, Sampling(temperature=temperature, seed=seed, **truncation), 37)
        for seed in range(count)
    ]
    for name, token_ids in (("positions", across_positions), ("seeds", across_seeds)):
        counts = np.bincount(token_ids, minlength=len(SMALL))
        assert_follows(counts, probabilities, (name, sampling))


@pytest.mark.full
@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=str)
def test_two_hundred_thousand_sampled_tokens_follow_the_exact_distribution(
    truncation: dict[str, float],
) -> None:
    sampling = Sampling(seed=5, **truncation)
    probabilities = np.exp(processed_log_probabilities(SMALL, sampling))
    token_ids = [sample(SMALL, sampling, position) for position in range(200_000)]
    assert_follows(np.bincount(token_ids, minlength=len(SMALL)), probabilities, sampling)


def test_successive_tokens_are_drawn_independently() -> None:
    sampling = Sampling(seed=99)
    probabilities = np.exp(processed_log_probabilities(SMALL, sampling))
    token_ids = np.array([sample(SMALL, sampling, position) for position in range(12_000)])
    pairs = token_ids[:-1] * len(SMALL) + token_ids[1:]
    counts = np.bincount(pairs, minlength=len(SMALL) ** 2)
    assert_follows(counts, np.outer(probabilities, probabilities).ravel(), "pairs")


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_a_flat_row_at_the_full_vocabulary_favours_no_token_ids(axis: str) -> None:
    flat = np.zeros(VOCABULARY_SIZE, dtype=np.float32)
    count = 6400
    if axis == "positions":
        token_ids = [sample(flat, Sampling(seed=1), position) for position in range(count)]
    else:
        token_ids = [sample(flat, Sampling(seed=seed), 1) for seed in range(count)]
    buckets = np.bincount(np.array(token_ids) * 64 // VOCABULARY_SIZE, minlength=64)
    assert_follows(buckets, np.full(64, 1 / 64), axis)
    # About 400 repeats are expected by chance; many more would mean a poor range of tokens.
    expected = VOCABULARY_SIZE * (1 - (1 - 1 / VOCABULARY_SIZE) ** count)
    assert abs(len(set(token_ids)) - expected) < 90


def rows_at_the_full_vocabulary() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    normal = rng.normal(size=VOCABULARY_SIZE)
    masked = normal.copy()
    masked[rng.random(VOCABULARY_SIZE) < 0.99] = -np.inf
    single = np.full(VOCABULARY_SIZE, -np.inf)
    single[777] = -3.0e38
    return {
        name: row.astype(np.float32)
        for name, row in {
            "flat": np.zeros(VOCABULARY_SIZE),
            "flat and far from zero": np.full(VOCABULARY_SIZE, -30_000.25),
            "normal": normal,
            "peaked": normal * 4,
            "very peaked": normal * 50,
            "two values": np.where(normal > 0, 17.0, 16.9),
            "coarse, as from bfloat16": (normal * 16).round() / 4,
            "long tail": -1.1 * np.log1p(rng.permutation(VOCABULARY_SIZE)),
            "huge": normal * 1e37,
            "tiny": normal * 1e-40,
            "at the ends of float32": np.where(normal > 0, 3.4e38, -3.4e38),
            "one certain token": np.where(np.arange(VOCABULARY_SIZE) == 49_151, 80.0, normal),
            "masked": masked,
            "a single finite logit": single,
        }.items()
    }


@pytest.mark.parametrize("temperature", [1e-200, 1e-31, 1e-9, 0.01, 0.7, 1.0, 2.0, 1e5, 1e31])
def test_the_prefilter_never_changes_a_token(temperature: float) -> None:
    for name, row in rows_at_the_full_vocabulary().items():
        for position in range(4):
            sampling = Sampling(temperature=temperature, seed=31)
            expected = sample_by_definition(row, sampling, position)
            assert sample(row, sampling, position) == expected, (name, position)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60),
    st.floats(MIN_TEMPERATURE, 1e300),
    st.integers(0, 2**64 - 1),
    st.integers(0, 200_000),
)
def test_the_prefilter_never_changes_a_token_on_any_row(
    values: list[float], temperature: float, seed: int, position: int
) -> None:
    row = np.array(values, dtype=np.float32)
    sampling = Sampling(temperature=temperature, seed=seed)
    assert sample(row, sampling, position) == sample_by_definition(row, sampling, position)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=60),
    st.floats(1e14, 1e18),
    st.integers(0, 200_000),
)
def test_the_prefilter_never_changes_a_token_where_scores_round_to_ties(
    steps: list[int], level: float, position: int
) -> None:
    row = np.array([1.0 + step * 2.0**-23 for step in steps], dtype=np.float32)
    sampling = Sampling(temperature=1 / level, seed=4)
    assert sample(row, sampling, position) == sample_by_definition(row, sampling, position)


def test_truncated_draws_equal_the_draw_from_the_whole_masked_row() -> None:
    row = (np.random.default_rng(2).normal(size=VOCABULARY_SIZE) * 3).astype(np.float32)
    for truncation, position in itertools.product(TRUNCATIONS, range(5)):
        sampling = Sampling(temperature=0.8, seed=6, **truncation)
        expected = sample_by_definition(row, sampling, position)
        assert sample(row, sampling, position) == expected


def test_temperature_0_is_the_lowest_id_of_the_largest_logit_whatever_else_is_set() -> None:
    row = np.array([0.0, 5.0, -np.inf, 5.0], dtype=np.float32)
    for seed in range(20):
        sampling = Sampling(temperature=0, top_k=1, top_p=0.1, min_p=0.9, seed=seed)
        assert sampling.is_greedy
        assert sample(row, sampling, seed) == 1
    assert processed_log_probabilities(row, Sampling(temperature=0)).tolist() == [
        -math.inf, 0.0, -math.inf, -math.inf,
    ]  # fmt: skip


def test_a_tiny_temperature_is_greedy_but_breaks_no_arithmetic() -> None:
    row = np.array([1.0, 1.0000001, -3.4e38, 3.4e38], dtype=np.float32)
    assert sample(row, Sampling(temperature=MIN_TEMPERATURE), 0) == 3
    assert sample(row[:2], Sampling(temperature=MIN_TEMPERATURE, top_p=0.5, min_p=0.1), 0) == 1


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ([1.0, math.nan, 2.0], "nan"),
        ([-math.inf, -math.inf], "-inf"),
        ([0.0, math.inf], "inf"),
        ([], "empty"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_distribution_are_refused_by_name(
    values: list[float], named: str, temperature: float
) -> None:
    row = np.array(values, dtype=np.float32)
    with pytest.raises(LogitsError, match=named):
        sample(row, Sampling(temperature=temperature), 0)
    with pytest.raises(LogitsError, match=named):
        processed_log_probabilities(row, Sampling(temperature=temperature, top_k=1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": MIN_TEMPERATURE / 10},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": math.nan},
        {"min_p": -0.1},
        {"min_p": 1.5},
    ],
    ids=str,
)
def test_a_sampling_outside_its_ranges_is_our_bug(wrong: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        Sampling(**wrong)


def test_the_row_is_left_as_it_was() -> None:
    row = (np.random.default_rng(1).normal(size=1000)).astype(np.float32)
    row.flags.writeable = False
    before = row.copy()
    for truncation in TRUNCATIONS:
        sample(row, Sampling(**truncation), 0)
    assert np.array_equal(row, before)


def test_threads_do_not_disturb_each_others_draws() -> None:
    row = (np.random.default_rng(1).normal(size=VOCABULARY_SIZE)).astype(np.float32)
    expected = [sample(row, Sampling(seed=3), position) for position in range(60)]
    drawn: dict[int, list[int]] = {}

    def draw(number: int) -> None:
        drawn[number] = [sample(row, Sampling(seed=3), position) for position in range(60)]

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(drawn[number] == expected for number in range(4))
