"""Names of full KV blocks: what a block holds follows from its tokens and from all before them.

A name is a SHA-256 over the block's tokens and the name of the block before. Unlike the rolling
hash of the link it must stand against texts that are made to collide: a wrong hit would answer one
user from another's prompt.
"""

import hashlib
from array import array
from collections.abc import Sequence

FIRST_NAME = b"outrider prefix cache 1"


def extend_names(
    names: list[bytes], token_ids: Sequence[int], *, count: int, block_size: int
) -> None:
    """Appends names up to those of the first `count` blocks of a text."""
    assert count * block_size <= len(token_ids), (count, block_size, len(token_ids))
    for index in range(len(names), count):
        tokens = array("i", token_ids[index * block_size : (index + 1) * block_size])
        before = names[-1] if names else FIRST_NAME
        names.append(hashlib.sha256(before + tokens.tobytes()).digest())
