"""One engine step laid out as rows: what every backend and the model need to run it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.kv_cache import PADDING_BLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRows:
    """One sequence's rows in a step: prefill chunk, decode row or verify rows alike."""

    token_ids: Sequence[int]  # run at places start .. start + len - 1 of the cache
    start: int  # tokens of this sequence already in the KV cache
    block_table: Sequence[int]  # covers start + len tokens
    num_logits: int  # logits wanted for the last num_logits rows
    # Added to the places in the cache for the rotary positions: a cache may begin in mid-sequence.
    position_offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a step, one after another, then padding rows that write to the padding block."""

    sequences: Sequence[SequenceRows]
    num_rows: int  # padding included
    token_ids: torch.Tensor  # [num_rows]
    positions: torch.Tensor  # [num_rows], rotary
    slot_mapping: torch.Tensor  # [num_rows], block * block_size + offset
    logit_rows: torch.Tensor  # rows whose logits are wanted, in order


def lay_out(sequences: Sequence[SequenceRows], *, block_size: int, row_multiple: int) -> StepRows:
    """Concatenate the sequences' rows and pad them to a multiple of `row_multiple`."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    for rows in sequences:
        token_ids.extend(rows.token_ids)
        end = rows.start + len(rows.token_ids)
        positions.extend(range(rows.start + rows.position_offset, end + rows.position_offset))
        table = rows.block_table
        slots.extend(
            table[place // block_size] * block_size + place % block_size
            for place in range(rows.start, end)
        )
        logit_rows.extend(range(len(token_ids) - rows.num_logits, len(token_ids)))
    padding = -len(token_ids) % row_multiple
    token_ids.extend([0] * padding)
    positions.extend([0] * padding)
    slots.extend(PADDING_BLOCK * block_size + index % block_size for index in range(padding))
    return StepRows(
        sequences=sequences,
        num_rows=len(token_ids),
        token_ids=_index(token_ids),
        positions=_index(positions),
        slot_mapping=_index(slots),
        logit_rows=_index(logit_rows),
    )


def _index(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))
