import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.noise import (
    NOISE_VERSION,
    gumbel,
    hash_tokens,
    hash_vocabulary,
    stream_key,
    uniform,
)
from outrider.serving.choice_seed import choice_seed

# (seed, position, token id): stream key, hash, u, g. Made once; a change is a new noise version.
GOLDEN = {
    (0, 0, 0): (
        0x8657229D0B5F148D, 0xB13F00A3DB4678BB, "0x1.627e0147b68cfp-1", "0x1.002afa0000000p+0",
    ),
    (0, 0, 1): (
        0x8657229D0B5F148D, 0x78263C2FCB7BEAD3, "0x1.e098f0bf2defap-2", "0x1.1dd4280000000p-2",
    ),
    (1, 0, 0): (
        0x2DE44664DA2F80CB, 0x5FA65E6E91C0B0A3, "0x1.7e9979ba4702ep-2", "0x1.00392a0000000p-6",
    ),
    (0, 1, 0): (
        0x7FE77685142C7507, 0x288ADD7EA96CED1A, "0x1.4456ebf54b674p-3", "-0x1.38fc7e0000000p-1",
    ),
    (12345, 678, 49151): (
        0x0C6FDB8E8C9B75FB, 0x0BDE795C9FF5BC1F, "0x1.7bcf2b93feb70p-5", "-0x1.1f40d00000000p+0",
    ),
    (2**64 - 1, 131071, 151935): (
        0xE710E5708B5B4FF6, 0xF0426C4CCA9E1944, "0x1.e084d899953c3p-1", "0x1.60f1ba0000000p+1",
    ),
    (2**63, 5, 2**31 - 1): (
        0x90C544F2874FF8A5, 0x07BF20C763A6E098, "0x1.efc831d8e9ba0p-6", "-0x1.408e320000000p+0",
    ),
}  # fmt: skip

SEEDS = st.integers(0, 2**64 - 1)
POSITIONS = st.integers(0, 2**31)


def hash_by_definition(seed: int, position: int, token_id: int) -> int:
    """The docstring's definition in plain integers, one token at a time."""

    def mix(z: int) -> int:
        z %= 2**64
        z ^= z >> 30
        z = z * 0xBF58476D1CE4E5B9 % 2**64
        z ^= z >> 27
        z = z * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key = mix(mix(seed + 0x9E3779B97F4A7C15) ^ mix((position + 1) * 0xD1342543DE82EF95))
    return mix(key ^ mix((token_id + 1) * 0x9E3779B97F4A7C15))


def chi_square(counts: np.ndarray, expected: np.ndarray | float) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """The value exceeded with probability 1e-4 (Wilson and Hilferty's approximation)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 3.719 * spread**0.5) ** 3


@pytest.mark.parametrize("point", GOLDEN)
def test_the_noise_has_its_golden_values(point: tuple[int, int, int]) -> None:
    seed, position, token_id = point
    key, hashed, u, g = GOLDEN[point]
    token_ids = np.array([token_id])
    hashes = hash_tokens(seed, position, token_ids)
    assert NOISE_VERSION == 1
    assert stream_key(seed, position) == key
    assert hashes.tolist() == [hashed]
    assert [value.hex() for value in uniform(hashes).tolist()] == [u]
    assert [value.hex() for value in gumbel(seed, position, token_ids).tolist()] == [g]


@settings(deadline=None)
@given(SEEDS, POSITIONS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20))
def test_the_hash_is_what_the_docstring_defines(
    seed: int, position: int, token_ids: list[int]
) -> None:
    hashes = hash_tokens(seed, position, np.array(token_ids)).tolist()
    assert hashes == [hash_by_definition(seed, position, token_id) for token_id in token_ids]


@settings(deadline=None)
@given(SEEDS, POSITIONS, st.integers(1, 3000), st.data())
def test_the_noise_does_not_depend_on_grouping_order_or_integer_type(
    seed: int, position: int, vocabulary_size: int, data: st.DataObject
) -> None:
    everything = gumbel(seed, position, np.arange(vocabulary_size))
    start = data.draw(st.integers(0, vocabulary_size - 1))
    for integer in (np.int16, np.int32, np.uint32, np.int64, np.uint64):
        token_ids = np.arange(start, vocabulary_size, 3)[::-1].astype(integer)
        assert np.array_equal(gumbel(seed, position, token_ids), everything[token_ids])
    assert gumbel(seed, position, np.array([start]))[0] == everything[start]
    out = np.empty(vocabulary_size, dtype=np.uint64)
    hash_vocabulary(seed, position, out=out, scratch=np.empty_like(out))
    assert np.array_equal(out, hash_tokens(seed, position, np.arange(vocabulary_size)))


def test_a_negative_seed_is_the_same_seed_modulo_two_to_the_64() -> None:
    assert stream_key(-1, 3) == stream_key(2**64 - 1, 3)


def test_the_extreme_hashes_give_finite_noise_and_exact_uniforms() -> None:
    ends = uniform(np.array([0, 2**64 - 1], dtype=np.uint64))
    assert ends.tolist() == [2.0**-53, 1 - 2.0**-53]
    noise = gumbel(9, 9, np.arange(200_000))
    assert np.isfinite(noise).all()
    assert np.array_equal(noise, noise.astype(np.float32).astype(np.float64))


def test_no_two_pairs_of_seed_and_position_share_a_stream() -> None:
    seeds = [*range(300), *(2**64 - 1 - seed for seed in range(100)), *(2**k for k in range(9, 64))]
    keys = {stream_key(seed, position) for seed in seeds for position in range(400)}
    assert len(keys) == len(seeds) * 400


def test_uniforms_are_uniform_over_tokens_positions_and_seeds() -> None:
    buckets = 256
    rows = {
        "tokens": uniform(hash_tokens(7, 3, np.arange(200_000))),
        "positions": np.array([uniform(hash_tokens(7, p, np.array([5])))[0] for p in range(8000)]),
        "seeds": np.array([uniform(hash_tokens(s, 3, np.array([5])))[0] for s in range(8000)]),
    }
    for name, values in rows.items():
        counts = np.bincount((values * buckets).astype(int), minlength=buckets)
        expected = len(values) / buckets
        assert chi_square(counts, expected) < chi_square_bound(buckets - 1), name


def test_neighbouring_tokens_positions_and_seeds_are_uncorrelated() -> None:
    token_ids = np.arange(100_000)
    here = uniform(hash_tokens(11, 20, token_ids)) - 0.5
    neighbours = {
        "next token": np.roll(here, 1),
        "next position": uniform(hash_tokens(11, 21, token_ids)) - 0.5,
        "next seed": uniform(hash_tokens(12, 20, token_ids)) - 0.5,
        "seed and position swapped": uniform(hash_tokens(20, 11, token_ids)) - 0.5,
        "next seed, previous position": uniform(hash_tokens(12, 19, token_ids)) - 0.5,
        "next choice": uniform(hash_tokens(choice_seed(11, 1), 20, token_ids)) - 0.5,
    }
    for name, there in neighbours.items():
        correlation = float((here * there).mean()) * 12
        assert abs(correlation) < 3.9 / len(token_ids) ** 0.5, name
        # Joint distribution, not only the linear part.
        cells = ((here + 0.5) * 16).astype(int) * 16 + ((there + 0.5) * 16).astype(int)
        counts = np.bincount(cells, minlength=256)
        assert chi_square(counts, len(token_ids) / 256) < chi_square_bound(255), name


def test_every_bit_of_seed_position_and_token_flips_about_half_of_the_hash() -> None:
    rng = np.random.default_rng(0)
    for bit in range(64):
        flipped = {"seed": 0, "position": 0, "token": 0}
        for _ in range(64):
            seed, position = int(rng.integers(2**63)), int(rng.integers(2**31))
            token_id = int(rng.integers(2**31))
            hashed = hash_by_definition(seed, position, token_id)
            others = {"seed": hash_by_definition(seed ^ 1 << bit, position, token_id)}
            if bit < 32:
                others["position"] = hash_by_definition(seed, position ^ 1 << bit, token_id)
                others["token"] = hash_by_definition(seed, position, token_id ^ 1 << bit)
            for name, other in others.items():
                flipped[name] += (hashed ^ other).bit_count()
        for name, count in flipped.items():
            if count:
                assert abs(count - 2048) < 4.5 * 32, (name, bit)
