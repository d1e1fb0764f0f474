"""Drafts with an EAGLE-3 head on a GPU: the rows that were verified, and then all positions of the
draft, are one captured graph; the tokens come back once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.engine.errors import StepError
from outrider.engine.gpu.buckets import sequence_buckets
from outrider.engine.gpu.chain_attention_kernel import ChainAttention
from outrider.engine.gpu.chain_inputs import Chain, ChainBounds, ChainInputs, fill
from outrider.engine.gpu.flashinfer_attention import (
    AttentionWorkspace,
    DevicePages,
    FlashInferAttention,
    HostPages,
)
from outrider.engine.gpu.head import GpuHead
from outrider.engine.gpu.sampling_kernel import NO_TOKEN, sample_rows, sampling_workspace
from outrider.engine.gpu.truncation import truncate_
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows, lay_out


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
        self._counts = sequence_buckets(bounds.max_sequences)
        # Views are not free to make, and a draft has a millisecond.
        self._host_inputs = {
            count: ChainInputs(bounds, count, self._pinned) for count in self._counts
        }

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

    def _copy_inputs(self, inputs: ChainInputs, chains: Sequence[Chain]) -> None:
        host = self._host_inputs[inputs.count]
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
