"""A model whose logits are a hash of the whole prefix, read back through the block table.

Whatever the step loop gets wrong about positions, blocks or rollback changes its tokens.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample

VOCAB_SIZE = 24


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    """float32 [vocab]: next-token logits behind a prefix."""
    digest = hashlib.blake2b(np.asarray(prefix, dtype="<i4").tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return generator.normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)


def oracle(
    prompt: Sequence[int], sampling: Sampling, max_tokens: int, stops: frozenset[int] = frozenset()
) -> list[int]:
    """The output that any schedule must give."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sample(logits_of(tokens), sampling, len(tokens)))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Stands in for outrider.engine.runner.Runner."""

    def __init__(self, block_size: int, max_step_rows: int) -> None:
        self._block_size = block_size
        self._max_step_rows = max_step_rows
        self._cache: dict[tuple[int, int], int] = {}
        self.rows_of_steps: list[list[int]] = []

    def forward(self, batch: Sequence[SequenceRows]) -> np.ndarray:
        assert sum(len(rows.token_ids) for rows in batch) <= self._max_step_rows
        self.rows_of_steps.append([len(rows.token_ids) for rows in batch])
        logits = []
        for rows in batch:
            for index, token_id in enumerate(rows.token_ids):
                self._cache[self._place(rows, rows.start + index)] = token_id
            end = rows.start + len(rows.token_ids)
            for position in range(end - rows.num_logits, end):
                prefix = [self._cache[self._place(rows, at)] for at in range(position + 1)]
                logits.append(logits_of(prefix))
        return np.stack(logits) if logits else np.zeros((0, VOCAB_SIZE), np.float32)

    def _place(self, rows: SequenceRows, position: int) -> tuple[int, int]:
        return rows.block_table[position // self._block_size], position % self._block_size
