"""Paged KV cache: the pool that hands out blocks, and the memory behind them.

The pool knows ids and names only; who holds a block, and which tokens it has, is the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.errors import CacheFull, ConfigError
from outrider.engine.model_config import ModelConfig

PADDING_BLOCK = 0


class BlockPool:
    """Ids of the KV cache's blocks. Owned by the engine thread. Block 0 is reserved for padding.

    A block may be named for its contents while it is held; then others can hold it too, and after
    the last of them has released it, it keeps its contents until the space is needed: of all such
    blocks the one that was released first goes first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"{num_blocks} blocks leave none beside the padding block"
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._num_holders = [0] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        # Named and held by nobody, in the order of their release.
        self._cached: dict[int, None] = {}

    @property
    def num_blocks(self) -> int:
        """All blocks, the padding block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks without contents that anybody could ask for."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose contents can be asked for by name."""
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds; the padding block is none of them."""
        return self._num_blocks - 1 - self.num_available

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, or none and raise CacheFull."""
        assert count >= 0, f"cannot allocate {count} blocks"
        if count > self.num_available:
            raise CacheFull(
                f"{count} blocks needed, {self.num_available} free of {self._num_blocks - 1}"
            )
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_holders[block] = 1
        return blocks

    def grow(self, block_table: list[int], *, length: int, block_size: int) -> None:
        """Extend a table to `length` tokens; where that takes too many blocks, CacheFull and no
        change. A table that is long enough stays as it is.
        """
        missing = -(-length // block_size) - len(block_table)
        if missing > 0:
            block_table.extend(self.allocate(missing))

    def name(self, block: int, name: bytes) -> None:
        """Says what a held block contains: nobody writes to it any more. Where another block has
        the name already, this one stays without.
        """
        assert self._num_holders[block], f"block {block} is held by nobody"
        assert block not in self._names, f"block {block} has a name"
        if name not in self._blocks:
            self._blocks[name] = block
            self._names[block] = name

    def take(self, name: bytes) -> int | None:
        """The block of this name, held once more; None if there is none."""
        block = self._blocks.get(name)
        if block is not None:
            self._cached.pop(block, None)
            self._num_holders[block] += 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back. Releasing a block that is not handed out is a bug of the caller.

        The last ones first: a text's end is of no use without its beginning, so it is to go first.
        """
        for block in reversed(blocks):
            assert 0 < block < self._num_blocks, f"block {block} of {self._num_blocks}"
            assert self._num_holders[block], f"block {block} released twice"
            self._num_holders[block] -= 1
            if self._num_holders[block]:
                continue
            if block in self._names:
                self._cached[block] = None
            else:
                self._free.append(block)

    def _evict(self) -> int:
        block = next(iter(self._cached))
        del self._cached[block]
        del self._blocks[self._names.pop(block)]
        return block


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """Keys and values of every token. One token's keys, then its values, are contiguous."""

    blocks: torch.Tensor  # [num_layers, num_blocks, block_size * 2 * kv_size]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.blocks.shape[1]


def allocate_kv_cache(
    config: ModelConfig, *, kv_cache_bytes: int, block_size: int, dtype: torch.dtype
) -> KvCache:
    """A zeroed cache of at most `kv_cache_bytes`; ConfigError if that is below two blocks."""
    block_numel = block_size * 2 * config.kv_size
    block_bytes = config.num_layers * block_numel * dtype.itemsize
    num_blocks = kv_cache_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_bytes is {kv_cache_bytes}: must be at least {2 * block_bytes}, two blocks"
        )
    # numpy's zeros are pages that the system clears when they are first written: a cache that is
    # mostly empty costs neither time at boot nor memory.
    zeros = np.zeros(config.num_layers * num_blocks * block_numel * dtype.itemsize, dtype=np.uint8)
    blocks = torch.from_numpy(zeros).view(dtype).view(config.num_layers, num_blocks, block_numel)
    return KvCache(blocks=blocks, block_size=block_size)
