"""The rolling hash by which two services agree on which token ids a sequence has committed.

    hash(empty) = 0x9E3779B97F4A7C15
    hash(text + [token_id]) = mix(hash(text) ^ ((token_id + 1) * 0xD1342543DE82EF95))

modulo 2**64, with mix the finaliser of SplitMix64 (as in `noise`). Each step is a bijection of the
hash, so texts that differ in one token never collide and others do as random 64-bit numbers would.
It guards against mistakes and lost messages, not against an adversary.
"""

from collections.abc import Iterable

PREFIX_HASH_ALGORITHM = "splitmix64-chain-1"
EMPTY_PREFIX_HASH = 0x9E3779B97F4A7C15


def extend_prefix_hash(prefix_hash: int, token_ids: Iterable[int]) -> int:
    """The hash of a text followed by `token_ids` (each >= 0), from the hash of the text."""
    for token_id in token_ids:
        value = prefix_hash ^ (((token_id + 1) * 0xD1342543DE82EF95) & 0xFFFFFFFFFFFFFFFF)
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        prefix_hash = value ^ (value >> 31)
    return prefix_hash
