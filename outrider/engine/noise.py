"""Shared sampling noise: a Gumbel variate for each (seed, position, token id), by integer hashing.

Stateless, so that the target, the draft, a batch and a replay all draw the same noise. Knows
nothing of logits. Any change of a value here needs a new NOISE_VERSION.

Definition, all integers modulo 2**64, `>>` logical:

    mix(z)       z ^= z >> 30; z *= 0xBF58476D1CE4E5B9
                 z ^= z >> 27; z *= 0x94D049BB133111EB
                 z ^= z >> 31                                     (the finaliser of SplitMix64)
    key          mix(mix(seed + 0x9E3779B97F4A7C15) ^ mix((position + 1) * 0xD1342543DE82EF95))
    hash         mix(key ^ mix((token_id + 1) * 0x9E3779B97F4A7C15))
    k            hash >> 12                                       (52 bits)
    u            (k + 0.5) * 2**-52                               (exact in float64; 0 < u < 1)
    g            float32(-log(-log(u))), both logarithms in float64; used as float64

Rounding g to float32 hides that two float64 logarithms may differ in their last bit: the rounded
values differ only where the exact one lies within that bit of the middle between two floats (less
than one value in 10**7), and a token changes only if the two best scores also lie that close.
Source of the scheme: Daliri, Musco, Suresh, arXiv 2408.07978; Steele, Lea, Flood, OOPSLA 2014.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NOISE_VERSION = 1

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_POSITION = 0xD1342543DE82EF95
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_in_place(values: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    np.right_shift(values, np.uint64(30), out=scratch)
    values ^= scratch
    values *= np.uint64(_FIRST)
    np.right_shift(values, np.uint64(27), out=scratch)
    values ^= scratch
    values *= np.uint64(_SECOND)
    np.right_shift(values, np.uint64(31), out=scratch)
    values ^= scratch


def stream_key(seed: int, position: int) -> int:
    """The 64-bit key of the noise for one sampled token.

    A bijection of the seed for each position and of the position for each seed; two other pairs
    share a key only as two random 64-bit numbers would. Negative seeds count modulo 2**64.
    """
    return _mix(_mix(seed + _GOLDEN) ^ _mix((position + 1) * _POSITION))


def _token_hashes(token_ids: NDArray[np.integer[Any]]) -> NDArray[np.uint64]:
    hashes = token_ids.astype(np.uint64)
    hashes += np.uint64(1)
    hashes *= np.uint64(_GOLDEN)
    _mix_in_place(hashes, np.empty_like(hashes))
    return hashes


@lru_cache(maxsize=8)
def _vocabulary_hashes(vocabulary_size: int) -> NDArray[np.uint64]:
    hashes = _token_hashes(np.arange(vocabulary_size, dtype=np.int64))
    hashes.flags.writeable = False
    return hashes


def hash_tokens(
    seed: int, position: int, token_ids: NDArray[np.integer[Any]]
) -> NDArray[np.uint64]:
    """The 64-bit hashes of these token ids (>= 0) in the stream of (seed, position)."""
    hashes = _token_hashes(token_ids)
    hashes ^= np.uint64(stream_key(seed, position))
    _mix_in_place(hashes, np.empty_like(hashes))
    return hashes


def hash_vocabulary(
    seed: int, position: int, *, out: NDArray[np.uint64], scratch: NDArray[np.uint64]
) -> None:
    """Fill `out` with `hash_tokens` of the ids 0 .. len(out) - 1, without allocating.

    `scratch` has the length of `out`; its contents are overwritten.
    """
    np.bitwise_xor(_vocabulary_hashes(len(out)), np.uint64(stream_key(seed, position)), out=out)
    _mix_in_place(out, scratch)


def uniform(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The exact uniforms, odd multiples of 2**-53 in (0, 1), of 64-bit hashes."""
    return ((hashes >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel_of_hashes(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    """The Gumbel variates of 64-bit hashes: float32 values held as float64."""
    variates = -np.log(-np.log(uniform(hashes)))
    return variates.astype(np.float32).astype(np.float64)


def gumbel(seed: int, position: int, token_ids: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """The noise of these token ids at `position`, the sampled token's index in prompt + output."""
    return gumbel_of_hashes(hash_tokens(seed, position, token_ids))
