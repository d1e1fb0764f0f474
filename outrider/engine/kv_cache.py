"""Paged KV cache: the pool that hands out blocks, and the memory behind them.

The pool knows ids only; who owns a block, and which tokens it holds, is the scheduler's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.errors import CacheFull, ConfigError
from outrider.engine.model_config import ModelConfig

PADDING_BLOCK = 0


class BlockPool:
    """Ids of the KV cache's blocks. Owned by the engine thread. Block 0 is reserved for padding."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, f"{num_blocks} blocks leave none beside the padding block"
        self._num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, PADDING_BLOCK, -1))
        self._is_used = bytearray(num_blocks)

    @property
    def num_blocks(self) -> int:
        """All blocks, the padding block included."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks handed out; the padding block is neither used nor free."""
        return self._num_blocks - 1 - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks, or none and raise CacheFull."""
        assert count >= 0, f"cannot allocate {count} blocks"
        if count > len(self._free):
            raise CacheFull(
                f"{count} blocks needed, {len(self._free)} free of {self._num_blocks - 1}"
            )
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._is_used[block] = 1
        return blocks

    def grow(self, block_table: list[int], *, length: int, block_size: int) -> None:
        """Extend a table to `length` tokens; where that takes too many blocks, CacheFull and no
        change. A table that is long enough stays as it is.
        """
        missing = -(-length // block_size) - len(block_table)
        if missing > 0:
            block_table.extend(self.allocate(missing))

    def release(self, blocks: Sequence[int]) -> None:
        """Take blocks back. Releasing a block that is not handed out is a bug of the caller."""
        for block in blocks:
            assert 0 < block < self._num_blocks, f"block {block} of {self._num_blocks}"
            assert self._is_used[block], f"block {block} released twice"
            self._is_used[block] = 0
            self._free.append(block)


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
