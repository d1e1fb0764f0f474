"""A model whose logits depend on every token that it finds in the paged cache, and on nothing
else: a row left over from a draft that was not accepted changes them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.engine.kv_cache import BlockPool
from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample

VOCAB_SIZE = 50
BLOCK_SIZE = 4


def logits_of(seed: int, token_ids: Sequence[int]) -> np.ndarray:
    digest = hashlib.sha256(repr((seed, list(token_ids))).encode()).digest()
    generator = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return generator.standard_normal(VOCAB_SIZE).astype(np.float32) * 2


def next_token(seed: int, token_ids: Sequence[int], sampling: Sampling) -> int:
    """The token of a model that needs no cache."""
    return sample(logits_of(seed, token_ids), sampling, len(token_ids))


def continued(seed: int, token_ids: Sequence[int], sampling: Sampling, count: int) -> list[int]:
    """The next tokens of that model."""
    text = list(token_ids)
    for _ in range(count):
        text.append(next_token(seed, text, sampling))
    return text[len(token_ids) :]


@dataclass
class FakeRunner:
    """In place of the engine's Runner."""

    seed: int = 0
    block_size: int = BLOCK_SIZE
    max_step_rows: int = 512
    max_sequence_length: int = 400
    cells: dict[tuple[int, int], int] = field(default_factory=dict)
    # (start, rows) of each sequence of each forward.
    forwards: list[list[tuple[int, int]]] = field(default_factory=list)

    def forward(self, batch: Sequence[SequenceRows]) -> np.ndarray:
        assert batch
        assert sum(len(rows.token_ids) for rows in batch) <= self.max_step_rows
        tables = [tuple(rows.block_table) for rows in batch]
        assert len({block for table in tables for block in table}) == sum(map(len, tables))
        self.forwards.append([(rows.start, len(rows.token_ids)) for rows in batch])
        logits = []
        for rows in batch:
            end = rows.start + len(rows.token_ids)
            assert 0 < end <= min(self.max_sequence_length, len(rows.block_table) * self.block_size)
            for position, token_id in zip(range(rows.start, end), rows.token_ids, strict=True):
                self.cells[self._cell(rows, position)] = token_id
            for last in range(end - rows.num_logits, end):
                seen = [self.cells[self._cell(rows, position)] for position in range(last + 1)]
                logits.append(logits_of(self.seed, seen))
        return np.array(logits, dtype=np.float32).reshape(len(logits), VOCAB_SIZE)

    def _cell(self, rows: SequenceRows, position: int) -> tuple[int, int]:
        return rows.block_table[position // self.block_size], position % self.block_size


def pool_of(num_blocks: int) -> BlockPool:
    """A pool that hands out so many blocks."""
    return BlockPool(num_blocks + 1)
