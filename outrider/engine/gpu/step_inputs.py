"""What a step brings to the device: one pinned buffer, filled on the host, and one copy.

The rows of every sequence are as many (a rectangle, for graphs) or ragged (with prompt chunks). In
both forms every sequence draws the same number of tokens, from as many rows of logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.step import SequenceRows
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
            "token_sources": self.num_rows,
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
    """A step's inputs on the device, as views into one buffer."""

    def __init__(self, shape: StepShape, buffer: torch.Tensor) -> None:
        """`buffer`: int32, at least `shape.size` numbers, aligned to 8 bytes."""
        self.shape = shape
        parts = {name: buffer[part] for name, part in _parts(shape).items()}
        self.seeds = parts["seeds"].view(torch.int64)
        self.temperatures = parts["temperatures"].view(torch.float64)
        self.draw_positions = parts["draw_positions"]
        self.logit_rows = parts["logit_rows"]
        self.draft_token_ids = parts["draft_token_ids"]
        self.draft_lengths = parts["draft_lengths"]
        self.token_ids = parts["token_ids"]
        self.token_sources = parts["token_sources"]  # of a step that is launched ahead only
        self.positions = parts["positions"]
        self.slots = parts["slots"]
        self.query_starts = parts["query_starts"]
        self.page_starts = parts["page_starts"]
        self.last_page_lengths = parts["last_page_lengths"]
        self.pages = parts["pages"]


class HostInputs:
    """The same on the host, as numpy arrays; by sequence where there is something to draw."""

    def __init__(self, shape: StepShape, buffer: torch.Tensor) -> None:
        """`buffer`: int32, pinned for copies that nobody waits for."""
        self.shape = shape
        numbers: Ints = buffer[: shape.size].numpy()
        parts = {name: numbers[part] for name, part in _parts(shape).items()}
        drawn = (shape.num_sequences, shape.num_drawn)
        self.seeds = parts["seeds"].view(np.int64).reshape(drawn)
        self.temperatures = parts["temperatures"].view(np.float64).reshape(drawn)
        self.draw_positions = parts["draw_positions"].reshape(drawn)
        self.logit_rows = parts["logit_rows"].reshape(drawn)
        self.draft_token_ids = parts["draft_token_ids"].reshape(drawn)
        self.draft_lengths = parts["draft_lengths"]
        self.token_ids = parts["token_ids"]
        self.token_sources = parts["token_sources"]  # of a step that is launched ahead only
        self.positions = parts["positions"]
        self.slots = parts["slots"]
        self.query_starts = parts["query_starts"]
        self.page_starts = parts["page_starts"]
        self.last_page_lengths = parts["last_page_lengths"]
        self.pages = parts["pages"]
        self._size_without_pages = shape.size - shape.num_pages

    def size_with(self, num_pages: int) -> int:
        """Numbers to copy where so many pages are used."""
        return self._size_without_pages + num_pages


def _parts(shape: StepShape) -> dict[str, slice]:
    """Where each part lies in the buffer."""
    parts = {}
    first = 0
    for name, size in shape.fields().items():
        parts[name] = slice(first, first + size)
        first += size
    return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Filled:
    """What the host keeps of the inputs that it wrote."""

    num_pages: int
    query_starts: torch.Tensor  # int32 [sequences + 1], for the plan; as are these
    page_starts: torch.Tensor  # int32 [sequences + 1]
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
    inputs: HostInputs,
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
    rows = [sequence.rows for sequence in sequences]
    missing = shape.num_sequences - len(rows)
    counts = np.array([len(one.token_ids) for one in rows] + [0] * missing, dtype=np.int32)
    starts = np.array([one.start for one in rows] + [0] * missing, dtype=np.int32)
    planned = counts
    if shape.is_rectangle:
        planned = np.full(shape.num_sequences, shape.num_drawn, dtype=np.int32)
    query_starts = _starts(planned)
    lengths = starts + planned
    used = -(-lengths // block_size)
    page_starts = _starts(used)
    pages = _pages(rows, used, page_starts)
    owner = np.repeat(np.arange(shape.num_sequences), planned)
    own_index = np.arange(shape.num_rows, dtype=np.int32) - query_starts[owner]
    is_own = own_index < counts[owner]
    own_rows = np.flatnonzero(is_own)
    places = own_index + starts[owner]
    slots = pages[page_starts[owner] + places // block_size] * block_size + places % block_size
    own_slots = slots[own_rows]
    if len(own_rows) < shape.num_rows:
        slots = np.where(is_own, slots, PADDING_BLOCK * block_size + places % block_size)
    token_ids = np.zeros(shape.num_rows, dtype=np.int32)
    token_ids[own_rows] = list(chain.from_iterable(one.token_ids for one in rows))

    inputs.token_ids[:] = token_ids
    np.minimum(places, max_position, out=inputs.positions)
    inputs.slots[:] = slots
    inputs.query_starts[:] = query_starts
    inputs.page_starts[:] = page_starts
    inputs.last_page_lengths[:] = (lengths - 1) % block_size + 1
    inputs.pages[: len(pages)] = pages
    _fill_draws(inputs, sequences, query_starts[:-1] + counts, token_ids)
    return Filled(
        num_pages=len(pages),
        query_starts=torch.from_numpy(query_starts),
        page_starts=torch.from_numpy(page_starts),
        lengths=torch.from_numpy(lengths),
        own_rows=own_rows,
        own_slots=own_slots.astype(np.int64),
    )


def _starts(sizes: Ints) -> Ints:
    """0, and the sum up to each: [sizes + 1]."""
    starts = np.zeros(len(sizes) + 1, dtype=np.int32)
    np.cumsum(sizes, out=starts[1:])
    return starts


def _pages(rows: Sequence[SequenceRows], used: Ints, starts: Ints) -> Ints:
    """The blocks of all sequences, one behind the other; where a table ends early, and for a
    sequence that is only padding, the padding block.
    """
    tables = [one.block_table for one in rows]
    held = np.array([len(table) for table in tables], dtype=np.int32)
    needed = used[: len(rows)]
    if len(rows) == len(used) and bool((held == needed).all()):
        flat = chain.from_iterable(tables)
        return np.fromiter(flat, dtype=np.int32, count=int(starts[-1]))
    pages = np.full(int(starts[-1]), PADDING_BLOCK, dtype=np.int32)
    taken = np.minimum(held, needed)
    flat = chain.from_iterable(
        table if count == len(table) else table[:count]
        for table, count in zip(tables, taken.tolist(), strict=True)
    )
    total = int(taken.sum())
    # Of each sequence the first `taken` of its places.
    place = np.arange(total) + np.repeat(starts[: len(rows)] - _starts(taken)[:-1], taken)
    pages[place] = np.fromiter(flat, dtype=np.int32, count=total)
    return pages


def _fill_draws(
    inputs: HostInputs, sequences: Sequence[SequenceStep], ends: Ints, token_ids: Ints
) -> None:
    """Which rows of logits are drawn from, and how: [sequences, num_drawn], the first `num_logits`
    of each sequence its own. `ends`: the row behind each sequence's own.
    """
    shape, count = inputs.shape, len(sequences)
    missing = [0] * (shape.num_sequences - count)
    num_logits = np.array([one.rows.num_logits for one in sequences] + missing, dtype=np.int32)
    base = np.array([one.base_length for one in sequences] + missing, dtype=np.int32)
    drafted = np.array([one.draft_length for one in sequences] + missing, dtype=np.int32)
    step = np.arange(shape.num_drawn, dtype=np.int32)
    # Beyond its own logits, and without any, a sequence draws from some row and is ignored.
    own = np.minimum(step, np.maximum(num_logits - 1, 0)[:, None])
    logit_rows = np.maximum(ends - num_logits, 0)[:, None] + own
    np.minimum(logit_rows, shape.num_rows - 1, out=logit_rows)
    inputs.logit_rows[:] = logit_rows
    inputs.draw_positions[:] = base[:, None] + step
    inputs.draft_lengths[:] = drafted
    # What a row of logits judges is the token of the row behind it.
    behind = np.minimum(logit_rows + 1, shape.num_rows - 1)
    inputs.draft_token_ids[:] = token_ids[behind]
    samplings = [one.sampling for one in sequences]
    temperatures = [0.0 if one is None else one.temperature for one in samplings]
    sampled = any(temperatures)
    inputs.temperatures[:count] = np.array(temperatures)[:, None]
    inputs.temperatures[count:] = 0.0
    if sampled:
        seeds = [0 if one is None else one.seed % 2**64 for one in samplings]
        inputs.seeds[:count] = np.array(seeds, dtype=np.uint64).view(np.int64)[:, None]
