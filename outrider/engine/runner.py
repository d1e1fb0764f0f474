"""Runs steps: the one ragged forward for prefill chunks, decode rows and verify rows together.

It knows neither requests nor sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.attention.interface import Attention
from outrider.engine.errors import StepError
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_store import FeatureStore
from outrider.engine.feature_tap import FeatureTap
from outrider.engine.model import Decoder
from outrider.engine.step import SequenceRows, lay_out

__all__ = ["Runner", "SequenceRows"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A decoder over a KV cache. One thread at a time; the cache's contents are its only state."""

    decoder: Decoder
    attention: Attention
    num_blocks: int
    block_size: int
    row_multiple: int
    max_sequence_length: int
    max_step_rows: int

    def forward(self, batch: Sequence[SequenceRows], tap: FeatureTap | None = None) -> np.ndarray:
        """Run a step's rows; returns float32 logits [sum of num_logits, vocab_size], in order.

        Keys and values of all rows are in the cache afterwards, and their features in the tap's
        store. A sequence's rows give the same bits whatever else is in the batch, with a tap or
        without. Raises StepError for rows beyond the engine's limits.
        """
        self._check(batch)
        rows = lay_out(batch, block_size=self.block_size, row_multiple=self.row_multiple)
        with torch.inference_mode():
            plan = self.attention.plan(rows)
            hidden = self.decoder.hidden_states(rows.token_ids, rows.positions, plan, tap)
            if tap is not None:
                num_tokens = sum(len(sequence.token_ids) for sequence in batch)
                tap.keep(rows.slot_mapping, num_tokens)
            return self._logits(hidden, rows.logit_rows)

    def make_tap(self, projection: FeatureProjection) -> FeatureTap:
        """A tap for this runner's forwards, with nothing kept yet. May be called on any thread."""
        padded_rows = -(-self.max_step_rows // self.row_multiple) * self.row_multiple
        return FeatureTap(
            projection,
            FeatureStore(
                num_blocks=self.num_blocks, block_size=self.block_size, width=projection.width
            ),
            hidden_size=self.decoder.config.hidden_size,
            max_rows=padded_rows,
            dtype=self.decoder.weights.embedding.weight.dtype,
        )

    def _logits(self, hidden: torch.Tensor, logit_rows: torch.Tensor) -> np.ndarray:
        count = len(logit_rows)
        if count == 0:
            return np.empty((0, self.decoder.config.vocab_size), dtype=np.float32)
        padding = -count % self.row_multiple
        padded = torch.cat((logit_rows, logit_rows.new_zeros(padding)))
        logits = self.decoder.logits(hidden.index_select(0, padded))
        return logits[:count].float().numpy()

    def _check(self, batch: Sequence[SequenceRows]) -> None:
        if not batch:
            raise StepError("a step needs at least one sequence")
        vocab_size = self.decoder.config.vocab_size
        num_rows = 0
        for rows in batch:
            count = len(rows.token_ids)
            num_rows += count
            length = rows.start + count
            if count == 0 or rows.start < 0:
                raise StepError(f"a sequence has {count} rows from position {rows.start}")
            if length > self.max_sequence_length:
                raise StepError(
                    f"sequence length is {length}: must be at most {self.max_sequence_length}"
                )
            if not 0 <= rows.num_logits <= count:
                raise StepError(f"num_logits is {rows.num_logits}: must be from 0 to {count}")
            if len(rows.block_table) * self.block_size < length:
                raise StepError(
                    f"block table of {len(rows.block_table)} blocks: must cover {length} tokens"
                )
            if min(rows.token_ids) < 0 or max(rows.token_ids) >= vocab_size:
                raise StepError(f"a token id is outside 0 to {vocab_size - 1}")
            if min(rows.block_table) < 1 or max(rows.block_table) >= self.num_blocks:
                raise StepError(f"a block is outside 1 to {self.num_blocks - 1}")
        if num_rows > self.max_step_rows:
            raise StepError(f"a step of {num_rows} rows: must be at most {self.max_step_rows}")
