"""Which sequences run in the next step, and who owns which KV blocks. Pure bookkeeping, without
tensors.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool
from target_service.block_names import extend_names
from target_service.sequence import Request, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerBounds:
    """How much a step may hold."""

    max_running_sequences: int
    max_waiting_sequences: int
    max_step_rows: int
    max_prefill_rows: int
    block_size: int
    caches_prefixes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """The next `length` tokens of a sequence that is not decoding yet."""

    sequence: Sequence
    length: int

    @property
    def is_last(self) -> bool:
        """Its last row yields the sequence's next token."""
        return self.sequence.cached_length + self.length == self.sequence.committed_length


# Beside running streams, prompt chunks are a half as long from here on, a third from twice so far,
# and so on.
FULL_CHUNK_CONTEXT = 1024
MIN_CHUNK_ROWS = 16


class Scheduler:
    """The queue and the running set. Owned by the engine's thread.

    First come, first served within a priority. When blocks run out the youngest running sequence
    gives up its own and is computed again later; its tokens do not change, since sampling depends
    on seed and position alone.

    Full blocks stay in the pool under the name of their text: a sequence that begins like an
    earlier one, or one that was preempted, starts behind what is still there.
    """

    def __init__(
        self,
        block_pool: BlockPool,
        bounds: SchedulerBounds,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self._pool = block_pool
        self._bounds = bounds
        self._on_preempt = on_preempt
        self._waiting: list[tuple[int, int, Sequence]] = []  # heap of (-priority, arrival, _)
        self.running: list[Sequence] = []
        self._arrivals = 0
        self.preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def is_full(self) -> bool:
        """No other sequence may wait."""
        return len(self._waiting) >= self._bounds.max_waiting_sequences

    def admit(self, request: Request) -> Sequence:
        """Queues a request."""
        assert not self.is_full
        sequence = Sequence.admit(request, self._arrivals)
        self._arrivals += 1
        self._push(sequence)
        return sequence

    def start_waiting(self) -> list[Sequence]:
        """Moves waiting sequences to the running set while there is room; returns them."""
        started = []
        while self._waiting and len(self.running) < self._bounds.max_running_sequences:
            sequence = self._waiting[0][2]
            self._take_prefix(sequence)
            # All of its tokens and one more must fit beside what runs, or it would be preempted at
            # once.
            missing = self._blocks_of(sequence.committed_length + 1) - len(sequence.block_table)
            if self._pool.num_available < missing:
                self._release(sequence)
                break
            heapq.heappop(self._waiting)
            self._grow(sequence, sequence.committed_length)
            if sequence.cached_prompt_length is None:
                sequence.cached_prompt_length = min(
                    sequence.cached_length, len(sequence.request.prompt_token_ids)
                )
            self.running.append(sequence)
            started.append(sequence)
        return started

    def decoding(self) -> list[Sequence]:
        """The sequences that each have a decode row in the next step."""
        return [sequence for sequence in self.running if sequence.is_decoding]

    def reserve_decode_rows(self, draft_lengths: dict[int, int]) -> list[Sequence]:
        """Makes room in the cache for every decode row and its draft; returns the decoding
        sequences that remain.

        `draft_lengths` is by arrival. A draft that finds no blocks is taken out of it; none is
        worth a preemption, so all committed tokens get theirs first.
        """
        for sequence in self.decoding():
            while sequence in self.running:
                try:
                    self._grow(sequence, sequence.committed_length)
                    break
                except CacheFull:
                    self.preempt(max(self.running, key=_first_to_go))
        remaining = self.decoding()
        for sequence in remaining:
            if sequence.arrival in draft_lengths:
                try:
                    self._grow(
                        sequence, sequence.committed_length + draft_lengths[sequence.arrival]
                    )
                except CacheFull:
                    del draft_lengths[sequence.arrival]
        return remaining

    def prefill_chunks(self, decode_rows: int) -> list[PrefillChunk]:
        """Prompt tokens for the next step, oldest sequence first, within the step's rows."""
        budget = self._bounds.max_step_rows - decode_rows
        if decode_rows:
            budget = min(budget, self._bounds.max_prefill_rows)
        chunks = []
        for sequence in self.running:
            length = min(budget, sequence.committed_length - sequence.cached_length)
            if decode_rows:
                # A row far into a prompt attends over all of it; streams beside it must not wait
                # for as many of these as for rows at the beginning.
                behind = sequence.cached_length // FULL_CHUNK_CONTEXT
                length = min(length, max(budget // (1 + behind), MIN_CHUNK_ROWS))
            if length > 0 and not sequence.is_decoding:
                chunks.append(PrefillChunk(sequence=sequence, length=length))
                budget -= length
        return chunks

    def computed(self, sequence: Sequence) -> None:
        """More of a running sequence is in the cache: names the blocks that have become full."""
        if not self._bounds.caches_prefixes:
            return
        count = sequence.cached_length // self._bounds.block_size
        if count > sequence.num_named:
            self._extend_names(sequence, count)
            for index in range(sequence.num_named, count):
                self._pool.name(sequence.block_table[index], sequence.block_names[index])
            sequence.num_named = count

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks; it waits to be computed again."""
        self.preemptions += 1
        self._release(sequence)
        self.running.remove(sequence)
        self._push(sequence)
        self._on_preempt(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Frees everything of a running or waiting sequence."""
        if sequence in self.running:
            self.running.remove(sequence)
            self._release(sequence)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
            heapq.heapify(self._waiting)

    def all_sequences(self) -> Iterable[Sequence]:
        """Running and waiting."""
        yield from self.running
        yield from (entry[2] for entry in self._waiting)

    def _take_prefix(self, sequence: Sequence) -> None:
        """The blocks of its text that are there, up to the first that is not. Its last token is
        computed in any case: what follows from it is in no cache.
        """
        if not self._bounds.caches_prefixes:
            return
        size = self._bounds.block_size
        most = (sequence.committed_length - 1) // size
        self._extend_names(sequence, most)
        for name in sequence.block_names[:most]:
            block = self._pool.take(name)
            if block is None:
                break
            sequence.block_table.append(block)
        sequence.num_named = len(sequence.block_table)
        sequence.cached_length = sequence.num_named * size

    def _extend_names(self, sequence: Sequence, count: int) -> None:
        extend_names(
            sequence.block_names,
            sequence.token_ids,
            count=count,
            block_size=self._bounds.block_size,
        )

    def _push(self, sequence: Sequence) -> None:
        heapq.heappush(self._waiting, (-sequence.request.priority, sequence.arrival, sequence))

    def _blocks_of(self, length: int) -> int:
        return -(-length // self._bounds.block_size)

    def _grow(self, sequence: Sequence, length: int) -> None:
        self._pool.grow(sequence.block_table, length=length, block_size=self._bounds.block_size)

    def _release(self, sequence: Sequence) -> None:
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_named = 0
        sequence.cached_length = 0


def _first_to_go(sequence: Sequence) -> tuple[int, int]:
    """The key of the sequence to preempt: the least important one, of these the youngest."""
    return -sequence.request.priority, sequence.arrival
