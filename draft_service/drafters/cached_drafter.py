"""What all drafters that compute with a KV cache of their own share: blocks are held, and how much
fits into a forward is known from boot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from draft_service.drafters.pace import MAX_BACKLOG, rows_within
from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Of a model or head that has been booted."""

    block_size: int
    max_sequence_length: int
    max_step_rows: int
    max_draft_length: int
    step_seconds: Sequence[tuple[int, float]]  # (rows, seconds of a forward), ascending


class HoldsBlocks(Protocol):
    """A drafter's state of one sequence."""

    block_table: list[int]


class CachedDrafter:
    """A drafter's part of its cache."""

    def __init__(self, limits: ModelLimits, block_pool: BlockPool) -> None:
        self.max_backlog = min(MAX_BACKLOG, limits.max_step_rows)
        self._limits = limits
        self._pool = block_pool

    def rows_within(self, seconds: float) -> int:
        """Rows of a forward of about so many seconds, by what boot measured."""
        return rows_within(seconds, self._limits.step_seconds, self._limits.max_step_rows)

    def close(self, state: HoldsBlocks) -> None:
        """Gives the blocks back."""
        self._pool.release(state.block_table)
        state.block_table = []

    def _grow(self, state: HoldsBlocks, num_rows: int) -> bool:
        """Hands the sequence blocks for so many rows; False if the pool has too few."""
        try:
            self._pool.grow(state.block_table, length=num_rows, block_size=self._limits.block_size)
        except CacheFull:
            return False
        return True
