"""Projected features of the tokens in a KV cache, in host memory beside it.

A feature lies where its token's keys and values do: who owns a block of the cache owns the features
in it, and they are freed with it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint16]


class FeatureStore:
    """One projection's features. Owned by the engine's thread.

    From its first write on, every row that the engine computes is written here. So of a slot whose
    token is cached either the features are the token's, or the mark says that they were never
    written (the token was computed before the store was made). What a rejected draft wrote lies
    behind the cached tokens and is overwritten before it is among them.
    """

    def __init__(self, *, num_blocks: int, block_size: int, width: int) -> None:
        """`width`: 16-bit numbers of a row. Raises MemoryError where there is no room."""
        num_slots = num_blocks * block_size
        # Zeros are pages that the system clears when they are first written, as in the KV cache.
        self._rows: Rows = np.zeros((num_slots, width), dtype=np.uint16)
        self._is_written = np.zeros(num_slots, dtype=np.bool_)
        self._block_size = block_size

    def write(self, slots: npt.NDArray[np.int64], rows: Rows) -> None:
        """Rows [len(slots), width] of slots (block * block_size + offset)."""
        self._rows[slots] = rows
        self._is_written[slots] = True

    def rows_of(self, block_table: Sequence[int], start: int, end: int) -> Rows:
        """Features of positions start .. end - 1, all of them cached and written, as a copy."""
        size = self._block_size
        block, offset = divmod(start, size)
        if offset + end - start <= size:
            # What most steps send: a few rows of one block.
            first = block_table[block] * size + offset
            return self._rows[first : first + end - start].copy()
        return self._rows[self._slots(block_table, start, end)]

    def valid_from(self, block_table: Sequence[int], length: int) -> int:
        """The smallest position from which on the features of all `length` cached tokens are here;
        `length` if not even the last one's are.
        """
        missing = np.flatnonzero(~self._is_written[self._slots(block_table, 0, length)])
        return int(missing[-1]) + 1 if len(missing) else 0

    def _slots(self, block_table: Sequence[int], start: int, end: int) -> npt.NDArray[np.int64]:
        size = self._block_size
        blocks = np.asarray(block_table[: -(-end // size)], dtype=np.int64)
        positions = np.arange(start, end)
        return blocks[positions // size] * size + positions % size
