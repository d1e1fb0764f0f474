"""Runs steps of a head: rows with true features and rows with its own, of many sequences together.

It knows neither requests nor sampling.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.attention.interface import Attention
from outrider.engine.eagle3.head import Eagle3Head
from outrider.engine.errors import StepError
from outrider.engine.step import SequenceRows, lay_out


class HeadOutput(NamedTuple):
    """What the rows with logits gave, in order."""

    logits: npt.NDArray[np.float32]  # [sum of num_logits, draft_vocab_size]
    features: torch.Tensor  # [sum of num_logits, hidden_size], of the next draft position


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRunner:
    """A head over a KV cache. One thread at a time; the cache's contents are its only state.

    Rows are not padded: what a draft is worth does not hang on the last bit of its logits.
    """

    head: Eagle3Head
    attention: Attention
    block_size: int
    max_sequence_length: int
    max_step_rows: int

    @property
    def dtype(self) -> torch.dtype:
        """Of features, as the rows take them."""
        return self.head.weights.embedding.weight.dtype

    def forward(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> HeadOutput:
        """Run a step's rows. `token_ids` of a row is the token behind its position; features are
        [rows of the batch, hidden_size]. Keys and values of all rows are in the cache afterwards.

        Raises StepError for rows beyond the limits.
        """
        self._check(batch, features)
        rows = lay_out(batch, block_size=self.block_size, row_multiple=1)
        with torch.inference_mode():
            plan = self.attention.plan(rows)
            hidden = self.head.hidden_states(rows.token_ids, features, rows.positions, plan)
            if len(rows.logit_rows) < len(hidden):
                hidden = hidden.index_select(0, rows.logit_rows)
            if len(hidden) == 0:
                vocab_size = self.head.config.draft_vocab_size
                return HeadOutput(np.empty((0, vocab_size), dtype=np.float32), hidden)
            logits, next_features = self.head.outputs(hidden)
            return HeadOutput(logits.float().numpy(), next_features)

    def _check(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> None:
        num_rows = 0
        for rows in batch:
            count = len(rows.token_ids)
            num_rows += count
            end = rows.start + count
            if count == 0 or rows.start < 0 or rows.position_offset < 0:
                raise StepError(f"a sequence has {count} rows from place {rows.start}")
            if end + rows.position_offset > self.max_sequence_length:
                raise StepError(
                    f"rows reach position {end + rows.position_offset - 1}: must be below "
                    f"{self.max_sequence_length}"
                )
            if len(rows.block_table) * self.block_size < end:
                raise StepError(
                    f"block table of {len(rows.block_table)} blocks: must cover {end} rows"
                )
        if not 0 < num_rows <= self.max_step_rows:
            raise StepError(f"a step of {num_rows} rows: must be 1 to {self.max_step_rows}")
        if tuple(features.shape) != (num_rows, self.head.config.hidden_size):
            raise StepError(
                f"features are {list(features.shape)}: must be "
                f"{[num_rows, self.head.config.hidden_size]}"
            )
