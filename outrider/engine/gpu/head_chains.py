"""Drafts with an EAGLE-3 head on a GPU: the rows that were verified, and then all positions of the
draft, are one captured graph; the tokens come back once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.errors import StepError
from outrider.engine.gpu.chain_attention_kernel import ChainAttention
from outrider.engine.gpu.flashinfer_attention import (
    AttentionWorkspace,
    DevicePages,
    FlashInferAttention,
    HostPages,
)
from outrider.engine.gpu.head import GpuHead
from outrider.engine.gpu.sampling_kernel import NO_TOKEN, sample_rows, sampling_workspace
from outrider.engine.gpu.steps import SEQUENCE_BUCKETS
from outrider.engine.gpu.truncation import truncate_
from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows, lay_out


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
        counts = [count for count in SEQUENCE_BUCKETS if count < self.max_sequences]
        counts.append(self.max_sequences)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainGraph:
    """One captured draft."""

    inputs: ChainInputs  # on the device
    graph: torch.cuda.CUDAGraph


class HeadChains:
    """Drafts over a head's cache. Owned by one thread at a time."""

    def __init__(self, head: GpuHead, bounds: ChainBounds, device: torch.device) -> None:
        layer, width = head.config.layer, head.config.hidden_size
        self.head = head
        self.bounds = bounds
        self._device = device
        size = ChainInputs.size(bounds)
        self._inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self._pinned = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        rows = max(bounds.max_sequences * bounds.rows_each, bounds.max_step_rows)
        self._features = torch.zeros(rows, width, dtype=head.cache.dtype, device=device)
        self._pinned_features = torch.zeros(rows, width, dtype=head.cache.dtype, pin_memory=True)
        drawn = bounds.max_draft_length * bounds.max_sequences
        self._drawn = torch.zeros(drawn, dtype=torch.int32, device=device)
        self._pinned_drawn = torch.zeros(drawn, dtype=torch.int32, pin_memory=True)
        ids = head.weights.target_token_ids
        self._token_ids = None if ids is None else torch.from_numpy(ids.astype(np.int32)).to(device)
        self._workspace = sampling_workspace(bounds.max_sequences, device)
        self._chain_attention = ChainAttention(
            max_sequences=bounds.max_sequences * bounds.rows_each,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            device=device,
        )
        self._prompt_attention = FlashInferAttention(layer, head.cache, AttentionWorkspace(device))
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graphs: dict[tuple[int, int], ChainGraph] = {}

    def capture(self) -> None:
        """A graph for every bucket, the largest first. Whatever a capture raises goes through."""
        pool = torch.cuda.graph_pool_handle()
        for count, steps in self.bounds.buckets:
            inputs = ChainInputs(self.bounds, count, self._inputs)
            self._copy_inputs(inputs, ())
            with torch.inference_mode():
                self.run_chain(inputs, steps)
                torch.cuda.synchronize(self._device)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    self.run_chain(inputs, steps)
            self.graphs[count, steps] = ChainGraph(inputs=inputs, graph=graph)
        torch.cuda.synchronize(self._device)

    def draft(self, chains: Sequence[Chain]) -> list[list[int]]:
        """The target's token ids of every draft, `draft_length` each, fewer where the head's
        logits are not finite.
        """
        assert 0 < len(chains) <= self.bounds.max_sequences, len(chains)
        torch.cuda.set_device(self._device)
        steps = max(chain.draft_length for chain in chains)
        count = next(count for count in self._counts if count >= len(chains))
        is_truncated = any(
            chain.sampling.is_truncated and not chain.sampling.is_greedy for chain in chains
        )
        graph = self.graphs[count, steps]
        with torch.inference_mode():
            self._copy_inputs(graph.inputs, chains)
            if is_truncated:
                self.run_chain(graph.inputs, steps, [chain.sampling for chain in chains])
            else:
                graph.graph.replay()
            drawn = steps * count
            self._pinned_drawn[:drawn].copy_(self._drawn[:drawn], non_blocking=True)
        self._done.record()
        self._done.synchronize()
        table = self._pinned_drawn[:drawn].view(steps, count).numpy()
        drafts = []
        for index, chain in enumerate(chains):
            token_ids = table[: chain.draft_length, index].tolist()
            if NO_TOKEN in token_ids:
                del token_ids[token_ids.index(NO_TOKEN) :]
            drafts.append(token_ids)
        return drafts

    def extend(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> None:
        """Runs rows with true features whose logits nobody wants; features [rows, hidden_size] on
        the host. Raises StepError for more rows than a step has.
        """
        torch.cuda.set_device(self._device)
        num_rows = len(features)
        if num_rows > self.bounds.max_step_rows:
            raise StepError(
                f"a step of {num_rows} rows: must be at most {self.bounds.max_step_rows}"
            )
        size = self.bounds.block_size
        rows = lay_out(batch, block_size=size, row_multiple=1)
        counts = np.array([len(one.token_ids) for one in batch], dtype=np.int32)
        lengths = np.array([one.start for one in batch], dtype=np.int32) + counts
        used = -(-lengths // size)
        pages = np.concatenate(
            [one.block_table[:needed] for one, needed in zip(batch, used, strict=True)]
        ).astype(np.int32)

        def starts(values: np.ndarray) -> torch.Tensor:
            ends = np.cumsum(values, dtype=np.int32)
            return torch.from_numpy(np.concatenate((np.zeros(1, dtype=np.int32), ends)))

        host = HostPages(
            query_starts=starts(counts), page_starts=starts(used), lengths=torch.from_numpy(lengths)
        )

        def placed(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, torch.int32)

        with torch.inference_mode():
            device = DevicePages(
                query_starts=placed(host.query_starts),
                page_starts=placed(host.page_starts),
                pages=placed(torch.from_numpy(pages)),
                last_page_lengths=placed((host.lengths - 1) % size + 1),
            )
            attention = self._prompt_attention
            attention.plan(host, device, num_rows=num_rows)
            self.head.run(
                placed(rows.token_ids),
                features.to(self._device),
                placed(rows.positions),
                placed(rows.slot_mapping),
                lambda qkv, out: attention.attend(0, qkv, out),
            )
        # The plan's host memory is free for the next one only when this has run.
        torch.cuda.synchronize(self._device)

    def run_chain(
        self, inputs: ChainInputs, steps: int, samplings: Sequence[Sampling] = ()
    ) -> None:
        """Launches a whole draft; the samplings where some of them truncate."""
        head, bounds, count = self.head, self.bounds, inputs.count
        cache, rows = head.cache, count * bounds.rows_each
        keys, values = cache.keys[0], cache.values[0]

        def attend_rows(qkv: torch.Tensor, out: torch.Tensor) -> None:
            self._chain_attention.attend(
                qkv, keys, values, inputs.row_page_starts, inputs.pages, inputs.lengths, out
            )

        normed, features = head.run(
            inputs.token_ids, self._features[:rows], inputs.positions, inputs.slots, attend_rows
        )
        last = slice(bounds.rows_each - 1, None, bounds.rows_each)
        normed, features = normed[last].contiguous(), features[last].contiguous()
        for step in range(steps):
            drawn = self._drawn[step * count : (step + 1) * count]
            logits = head.logits(normed)
            if samplings:
                _truncate(logits, inputs.temperatures, samplings)
            sample_rows(
                logits,
                inputs.seeds,
                inputs.draw_positions[step],
                inputs.temperatures,
                drawn,
                self._workspace,
                self._token_ids,
            )
            if step + 1 == steps:
                break
            lengths = inputs.step_lengths[step]

            def attend_step(
                qkv: torch.Tensor, out: torch.Tensor, lengths: torch.Tensor = lengths
            ) -> None:
                self._chain_attention.attend(
                    qkv, keys, values, inputs.page_starts, inputs.pages, lengths, out
                )

            normed, features = head.run(
                drawn,
                features,
                inputs.step_positions[step],
                inputs.step_slots[step],
                attend_step,
            )

    def drawn(self, count: int, steps: int) -> np.ndarray:
        """What the last draft drew, int32 [steps, count]. Waits for the device."""
        return self._drawn[: steps * count].view(steps, count).cpu().numpy()

    @property
    def _counts(self) -> list[int]:
        return sorted({count for count, _ in self.graphs})

    def _copy_inputs(self, inputs: ChainInputs, chains: Sequence[Chain]) -> None:
        host = ChainInputs(self.bounds, inputs.count, self._pinned)
        num_pages = fill(host, self.bounds, chains)
        size = host.size_without_pages + num_pages
        self._inputs[:size].copy_(self._pinned[:size], non_blocking=True)
        rows_each = self.bounds.rows_each
        for index, chain in enumerate(chains):
            end = (index + 1) * rows_each
            self._pinned_features[end - len(chain.features) : end] = chain.features
        rows = len(chains) * rows_each
        self._features[:rows].copy_(self._pinned_features[:rows], non_blocking=True)


def _truncate(
    logits: torch.Tensor, temperatures: torch.Tensor, samplings: Sequence[Sampling]
) -> None:
    device, padding = logits.device, len(logits) - len(samplings)
    top_k = [one.top_k for one in samplings] + [0] * padding
    top_p = [one.top_p for one in samplings] + [1.0] * padding
    min_p = [one.min_p for one in samplings] + [0.0] * padding
    truncate_(
        logits,
        temperatures,
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, dtype=torch.float64, device=device),
        torch.tensor(min_p, dtype=torch.float64, device=device),
    )
