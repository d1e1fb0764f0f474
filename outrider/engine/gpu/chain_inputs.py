"""What a draft by an EAGLE-3 head brings to the device: one pinned buffer, filled on the host."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.gpu.buckets import sequence_buckets
from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """One draft that is asked for."""

    rows: SequenceRows  # with true features, at least one and at most max_draft_length + 1
    features: torch.Tensor  # [rows, hidden_size] on the host, in the head's dtype
    sampling: Sampling
    first_position: int  # of the first token drafted, in prompt + output
    draft_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainBounds:
    """What graphs are captured for."""

    block_size: int
    max_sequence_length: int
    max_step_rows: int
    max_sequences: int
    max_draft_length: int

    @property
    def rows_each(self) -> int:
        """Rows with true features: a whole draft accepted, and the token behind it."""
        return self.max_draft_length + 1

    @property
    def max_pages_each(self) -> int:
        return -(-(self.max_sequence_length + self.max_draft_length) // self.block_size)

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(sequences, draft length) of every graph, largest first."""
        counts = sequence_buckets(self.max_sequences)
        return sorted(
            ((count, steps) for count in counts for steps in range(1, self.max_draft_length + 1)),
            key=lambda bucket: -bucket[0] * bucket[1],
        )


class ChainInputs:
    """Views into one buffer, on the host or on the device, for so many sequences.

    [sequences * rows_each] for the rows with true features, right-aligned: what fills a sequence up
    comes before them, writes to the padding block and sees one key. [steps, sequences] for what
    follows.
    """

    def __init__(self, bounds: ChainBounds, count: int, buffer: torch.Tensor) -> None:
        rows, drawn = count * bounds.rows_each, count * bounds.max_draft_length
        sizes = {
            "seeds": 2 * count,
            "temperatures": 2 * count,
            "draw_positions": drawn,
            "token_ids": rows,
            "positions": rows,
            "slots": rows,
            "lengths": rows,
            "row_page_starts": rows,
            "step_positions": drawn,
            "step_slots": drawn,
            "step_lengths": drawn,
            "page_starts": count,
            "pages": count * bounds.max_pages_each,
        }
        parts = {}
        first = 0
        for name, size in sizes.items():
            parts[name] = buffer[first : first + size]
            first += size
        steps = (bounds.max_draft_length, count)
        self.count = count
        self.size_without_pages = first - sizes["pages"]
        self.seeds = parts["seeds"].view(torch.int64)
        self.temperatures = parts["temperatures"].view(torch.float64)
        self.draw_positions = parts["draw_positions"].view(steps)
        self.token_ids = parts["token_ids"]
        self.positions = parts["positions"]
        self.slots = parts["slots"]
        self.lengths = parts["lengths"]
        self.row_page_starts = parts["row_page_starts"]
        self.step_positions = parts["step_positions"].view(steps)
        self.step_slots = parts["step_slots"].view(steps)
        self.step_lengths = parts["step_lengths"].view(steps)
        self.page_starts = parts["page_starts"]
        self.pages = parts["pages"]

    @staticmethod
    def size(bounds: ChainBounds) -> int:
        """int32 numbers of a buffer for any number of sequences."""
        each = 5 + 5 * bounds.rows_each + 4 * bounds.max_draft_length + bounds.max_pages_each
        return bounds.max_sequences * each + bounds.max_sequences % 2


def fill(inputs: ChainInputs, bounds: ChainBounds, chains: Sequence[Chain]) -> int:
    """Writes drafts on the host; returns the number of pages."""
    count, rows_each, size = inputs.count, bounds.rows_each, bounds.block_size
    num_steps = bounds.max_draft_length
    own = np.ones(count, dtype=np.int32)
    ends = np.ones(count, dtype=np.int32)  # places in the cache behind the true rows
    offsets = np.zeros(count, dtype=np.int32)
    firsts = np.zeros(count, dtype=np.int32)
    token_ids = np.zeros((count, rows_each), dtype=np.int32)
    seeds, temperatures = inputs.seeds.numpy(), inputs.temperatures.numpy()
    seeds[:] = 0
    temperatures[:] = 0.0
    for index, chain in enumerate(chains):
        rows = chain.rows
        own[index] = len(rows.token_ids)
        ends[index] = rows.start + len(rows.token_ids)
        offsets[index] = rows.position_offset
        firsts[index] = chain.first_position
        token_ids[index, rows_each - own[index] :] = rows.token_ids
        if not chain.sampling.is_greedy:
            temperatures[index] = chain.sampling.temperature
            seeds[index] = np.uint64(chain.sampling.seed % 2**64).astype(np.int64)
    used = -(-(ends + num_steps - 1) // size)
    page_ends = np.cumsum(used)
    page_starts = (page_ends - used).astype(np.int32)
    pages = np.full(int(page_ends[-1]), PADDING_BLOCK, dtype=np.int32)
    for chain, first, needed in zip(chains, page_starts, used, strict=False):
        table = chain.rows.block_table
        held = min(len(table), int(needed))
        pages[first : first + held] = table[:held]
    column = np.arange(rows_each)
    places = ends[:, None] - rows_each + column
    is_own = column >= (rows_each - own)[:, None]
    is_own[len(chains) :] = False
    places = np.where(is_own, places, 0)
    slots = pages[page_starts[:, None] + places // size] * size + places % size
    shape = (count, rows_each)
    inputs.token_ids.numpy().reshape(shape)[:] = token_ids
    inputs.positions.numpy().reshape(shape)[:] = np.where(is_own, places + offsets[:, None], 0)
    inputs.slots.numpy().reshape(shape)[:] = np.where(is_own, slots, PADDING_BLOCK)
    inputs.lengths.numpy().reshape(shape)[:] = np.where(is_own, places + 1, 1)
    inputs.row_page_starts.numpy().reshape(shape)[:] = page_starts[:, None]
    step = np.arange(num_steps, dtype=np.int32)[:, None]
    step_places = ends + step
    last_page = page_starts + np.minimum(step_places // size, used - 1)
    step_slots = pages[last_page] * size + step_places % size
    last_position = bounds.max_sequence_length - 1
    inputs.step_positions.numpy()[:] = np.minimum(step_places + offsets, last_position)
    inputs.step_slots.numpy()[:] = step_slots
    inputs.step_lengths.numpy()[:] = np.minimum(step_places + 1, used * size)
    inputs.draw_positions.numpy()[:] = firsts + step
    inputs.page_starts.numpy()[:] = page_starts
    inputs.pages.numpy()[: len(pages)] = pages
    return len(pages)
