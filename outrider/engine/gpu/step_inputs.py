"""What a step brings to the device: one pinned buffer, filled on the host, and one copy.

The rows of every sequence are as many (a rectangle, for graphs) or ragged (with prompt chunks). In
both forms every sequence draws the same number of tokens, from as many rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.verify_step import SequenceStep

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step, padding included."""

    num_sequences: int
    num_rows: int
    num_drawn: int  # rows of logits per sequence
    num_pages: int  # capacity
    is_rectangle: bool  # every sequence has num_drawn rows, all with logits

    @property
    def num_logits(self) -> int:
        return self.num_sequences * self.num_drawn

    def fields(self) -> dict[str, int]:
        """int32 numbers of every part, in order. The first two are of 64-bit numbers; the pages
        come last, so that only those in use are copied.
        """
        return {
            "seeds": 2 * self.num_logits,
            "temperatures": 2 * self.num_logits,
            "draw_positions": self.num_logits,
            "logit_rows": self.num_logits,
            "draft_token_ids": self.num_logits,
            "draft_lengths": self.num_sequences,
            "token_ids": self.num_rows,
            "positions": self.num_rows,
            "slots": self.num_rows,
            "query_starts": self.num_sequences + 1,
            "page_starts": self.num_sequences + 1,
            "last_page_lengths": self.num_sequences,
            "pages": self.num_pages,
        }

    @property
    def size(self) -> int:
        """int32 numbers in all."""
        return sum(self.fields().values())


class StepInputs:
    """Views into one buffer, on the host or on the device, by the parts of a shape."""

    def __init__(self, shape: StepShape, buffer: torch.Tensor) -> None:
        """`buffer`: int32, at least `shape.size` numbers, aligned to 8 bytes."""
        self.shape = shape
        self.buffer = buffer
        first = 0
        parts = {}
        for name, size in shape.fields().items():
            parts[name] = buffer[first : first + size]
            first += size
        self.seeds = parts["seeds"].view(torch.int64)
        self.temperatures = parts["temperatures"].view(torch.float64)
        self.draw_positions = parts["draw_positions"]
        self.logit_rows = parts["logit_rows"]
        self.draft_token_ids = parts["draft_token_ids"]
        self.draft_lengths = parts["draft_lengths"]
        self.token_ids = parts["token_ids"]
        self.positions = parts["positions"]
        self.slots = parts["slots"]
        self.query_starts = parts["query_starts"]
        self.page_starts = parts["page_starts"]
        self.last_page_lengths = parts["last_page_lengths"]
        self.pages = parts["pages"]
        self._pages_first = first - shape.num_pages

    def size_with(self, num_pages: int) -> int:
        """Numbers to copy where so many pages are used."""
        return self._pages_first + num_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What the host keeps of the inputs that it wrote."""

    num_pages: int
    lengths: torch.Tensor  # int32 [sequences], keys of each with its new rows
    own_rows: npt.NDArray[np.int64]  # rows that are no padding
    own_slots: npt.NDArray[np.int64]  # and where their keys, values and features belong


def rectangle_shape(num_sequences: int, rows_each: int, max_pages_each: int) -> StepShape:
    """Of a graph: every row draws."""
    return StepShape(
        num_sequences=num_sequences,
        num_rows=num_sequences * rows_each,
        num_drawn=rows_each,
        num_pages=num_sequences * max_pages_each,
        is_rectangle=True,
    )


def ragged_shape(sequences: Sequence[SequenceStep], max_pages_each: int) -> StepShape:
    """Of a step with prompt chunks, or larger than any graph."""
    return StepShape(
        num_sequences=len(sequences),
        num_rows=sum(len(sequence.rows.token_ids) for sequence in sequences),
        num_drawn=max(1, max(sequence.rows.num_logits for sequence in sequences)),
        num_pages=len(sequences) * max_pages_each,
        is_rectangle=False,
    )


def fill(
    inputs: StepInputs,
    sequences: Sequence[SequenceStep],
    *,
    block_size: int,
    max_position: int,
) -> Filled:
    """Writes a step on the host. In a rectangle, a sequence with fewer rows is filled up by rows
    behind its own, and missing sequences by ones of the padding block: what they write goes there,
    and what they draw is ignored.
    """
    shape = inputs.shape
    counts = np.array([len(sequence.rows.token_ids) for sequence in sequences], dtype=np.int32)
    starts = np.array([sequence.rows.start for sequence in sequences], dtype=np.int32)
    if shape.is_rectangle:
        planned = np.full(shape.num_sequences, shape.num_drawn, dtype=np.int32)
        starts = np.concatenate(
            (starts, np.zeros(shape.num_sequences - len(sequences), dtype=np.int32))
        )
    else:
        planned = counts
    query_starts = np.zeros(shape.num_sequences + 1, dtype=np.int32)
    np.cumsum(planned, out=query_starts[1:])
    lengths = starts + planned
    used = -(-lengths // block_size)
    page_starts = np.zeros(shape.num_sequences + 1, dtype=np.int32)
    np.cumsum(used, out=page_starts[1:])
    pages = np.full(int(page_starts[-1]), PADDING_BLOCK, dtype=np.int32)
    for sequence, first, count in zip(sequences, page_starts, used, strict=False):
        table = sequence.rows.block_table
        own = min(len(table), int(count))
        pages[first : first + own] = table[:own]

    token_ids = np.zeros(shape.num_rows, dtype=np.int32)
    is_own = np.zeros(shape.num_rows, dtype=np.bool_)
    for sequence, first, count in zip(sequences, query_starts, counts, strict=False):
        token_ids[first : first + count] = sequence.rows.token_ids
        is_own[first : first + count] = True
    owner = np.repeat(np.arange(shape.num_sequences), planned)
    places = np.arange(shape.num_rows, dtype=np.int32) - query_starts[owner] + starts[owner]
    slots = pages[page_starts[owner] + places // block_size] * block_size + places % block_size
    slots[~is_own] = PADDING_BLOCK * block_size + places[~is_own] % block_size

    inputs.token_ids.numpy()[:] = token_ids
    np.minimum(places, max_position, out=inputs.positions.numpy())
    inputs.slots.numpy()[:] = slots
    inputs.query_starts.numpy()[:] = query_starts
    inputs.page_starts.numpy()[:] = page_starts
    inputs.last_page_lengths.numpy()[:] = (lengths - 1) % block_size + 1
    inputs.pages.numpy()[: len(pages)] = pages
    _fill_draws(inputs, sequences, query_starts, counts)
    own_rows = np.flatnonzero(is_own)
    return Filled(
        num_pages=len(pages),
        lengths=torch.from_numpy(lengths),
        own_rows=own_rows,
        own_slots=slots[own_rows].astype(np.int64),
    )


def _fill_draws(
    inputs: StepInputs, sequences: Sequence[SequenceStep], query_starts: Ints, counts: Ints
) -> None:
    """Which rows of logits are drawn from, and how: [sequences, num_drawn], the first
    `num_logits` of each sequence its own.
    """
    shape = inputs.shape
    size = (shape.num_sequences, shape.num_drawn)
    seeds = inputs.seeds.numpy().reshape(size)
    temperatures = inputs.temperatures.numpy().reshape(size)
    positions = inputs.draw_positions.numpy().reshape(size)
    logit_rows = inputs.logit_rows.numpy().reshape(size)
    drafts = inputs.draft_token_ids.numpy().reshape(size)
    draft_lengths = inputs.draft_lengths.numpy()
    draft_lengths[:] = 0
    drafts[:] = 0
    temperatures[:] = 0.0
    seeds[:] = 0
    positions[:] = 0
    logit_rows[:] = 0
    steps = np.arange(shape.num_drawn)
    for index, sequence in enumerate(sequences):
        rows = sequence.rows
        if rows.num_logits == 0 or sequence.sampling is None:
            continue
        first = int(query_starts[index]) + int(counts[index]) - rows.num_logits
        logit_rows[index] = first + np.minimum(steps, rows.num_logits - 1)
        positions[index] = sequence.base_length + steps
        sampling = sequence.sampling
        if not sampling.is_greedy:
            temperatures[index] = sampling.temperature
            seeds[index] = np.uint64(sampling.seed % 2**64).astype(np.int64)
        if sequence.draft_length:
            draft_lengths[index] = sequence.draft_length
            drafts[index, : sequence.draft_length] = rows.token_ids[-sequence.draft_length :]
