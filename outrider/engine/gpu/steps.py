"""Steps on a GPU: a captured graph where the step has its shape, single launches otherwise.

The host writes one buffer, plans the attention, copies the buffer and launches; what comes back is
a few numbers a sequence. Nothing in between waits for the device, so that a plain step can be
launched while the one before it runs: its tokens are then taken from that one's results, on the
device.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.acceptance import Verdict
from outrider.engine.errors import StepError
from outrider.engine.feature_projection import load_projection
from outrider.engine.feature_store import FeatureStore
from outrider.engine.feature_tap import Tap
from outrider.engine.gpu.decoder import GpuDecoder
from outrider.engine.gpu.feature_tap import MOST_RUNNING, GpuFeatureTap, RunningFeatures
from outrider.engine.gpu.flashinfer_attention import (
    AttentionWorkspace,
    DevicePages,
    FlashInferAttention,
    HostPages,
)
from outrider.engine.gpu.pinned import placed
from outrider.engine.gpu.sampling_kernel import NO_TOKEN, accept, sample_rows, sampling_workspace
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.step_inputs import (
    Filled,
    HostInputs,
    StepInputs,
    StepShape,
    fill,
    ragged_shape,
)
from outrider.engine.gpu.truncation import truncate_
from outrider.engine.host_verdict import verdict_of
from outrider.engine.placement import DevicePlacement
from outrider.engine.sampling import LogitsError
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import NextRow, RunningStep, SequenceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults:
    """Where one step's results come to the host."""

    numbers: torch.Tensor  # int32, pinned
    done: torch.cuda.Event  # they have come


class StepMemory:
    """What all steps share, since the device works on one at a time: inputs, results, workspaces.
    Only the host may lag behind, and its copies of the results take turns: as many as
    steps run at once, or make a draft.
    """

    def __init__(
        self, bounds: StepBounds, *, vocab_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`dtype`: of the logits."""
        largest = StepShape(
            num_sequences=bounds.max_sequences,
            num_rows=bounds.most_rows,
            num_drawn=1 + bounds.max_draft_length,
            num_pages=bounds.max_sequences * bounds.max_pages_each,
            is_rectangle=False,
        )
        # The first decode's: one sequence that looks at more logits than requests do.
        deepest = replace(largest, num_sequences=1, num_drawn=bounds.most_logits)
        size = max(largest.size, deepest.size)
        size += size % 2
        self.device = device
        self.inputs = torch.zeros(size, dtype=torch.int32, device=device)
        self.pinned_inputs = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        num_results = bounds.most_logits + bounds.max_sequences
        self.results = torch.zeros(num_results, dtype=torch.int32, device=device)
        self.host_results = [
            StepResults(
                numbers=torch.zeros(num_results, dtype=torch.int32, pin_memory=True),
                done=torch.cuda.Event(),  # type: ignore[no-untyped-call]
            )
            for _ in range(max(MOST_RUNNING, bounds.max_draft_length))
        ]
        # What the host wrote for the last step is on the device, and may be written over.
        self.inputs_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # One for all graphs, each of which would keep its own otherwise.
        self.logits = torch.empty(bounds.most_logits, vocab_size, dtype=dtype, device=device)
        self.sampling = sampling_workspace(bounds.most_logits, device)
        self.attention = AttentionWorkspace(device)


def run_step(
    decoder: GpuDecoder, memory: StepMemory, inputs: StepInputs, attention: FlashInferAttention
) -> torch.Tensor:
    """Launches everything from the rows' embeddings to the verdicts; returns the logits
    [num_logits, vocab_size].
    """
    normed = decoder.hidden_states(inputs, attention)
    if not inputs.shape.is_rectangle:
        normed = normed.index_select(0, inputs.logit_rows)
    logits = decoder.logits(normed, memory.logits[: inputs.shape.num_logits])
    draw(memory, inputs, logits)
    return logits


def draw(memory: StepMemory, inputs: StepInputs, logits: torch.Tensor) -> None:
    """Draws a token from every row of logits, and counts the drafts that equal it."""
    shape = inputs.shape
    drawn = memory.results[: shape.num_logits]
    sample_rows(
        logits, inputs.seeds, inputs.draw_positions, inputs.temperatures, drawn, memory.sampling
    )
    accepted = memory.results[shape.num_logits : shape.num_logits + shape.num_sequences]
    accept(inputs.draft_token_ids, drawn, inputs.draft_lengths, accepted, shape.num_drawn)


def pages_of(inputs: StepInputs) -> DevicePages:
    """The parts of a step's inputs that attention reads."""
    return DevicePages(
        query_starts=inputs.query_starts,
        page_starts=inputs.page_starts,
        pages=inputs.pages,
        last_page_lengths=inputs.last_page_lengths,
    )


def host_pages(filled: Filled) -> HostPages:
    """What attention plans with."""
    return HostPages(
        query_starts=filled.query_starts, page_starts=filled.page_starts, lengths=filled.lengths
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGraph:
    """One captured step."""

    host: HostInputs
    inputs: StepInputs
    attention: FlashInferAttention
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


class GpuSteps:
    """A StepEngine and AheadEngine on one GPU. Owned by one thread at a time."""

    runs_beside_host = True

    def __init__(
        self,
        *,
        decoder: GpuDecoder,
        bounds: StepBounds,
        memory: StepMemory,
        graphs: dict[tuple[int, int], StepGraph],
        ragged_attention: FlashInferAttention,
    ) -> None:
        """`graphs` by sequences and rows of each."""
        self.decoder = decoder
        self.bounds = bounds
        self.memory = memory
        self.graphs = graphs
        self._ragged_attention = ragged_attention
        self._counts = sorted({count for count, _ in graphs})
        self._device = memory.device
        self._host_results = cycle(memory.host_results)

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> "GpuStep":
        return self._launch(sequences, tap, None)

    def launch_next(
        self, rows: Sequence[NextRow], tap: Tap | None, *, after: RunningStep
    ) -> "GpuStep":
        assert isinstance(after, GpuStep)
        sequences = [
            SequenceStep(
                # The token is put in on the device.
                rows=SequenceRows(
                    token_ids=(0,), start=row.start, block_table=row.block_table, num_logits=1
                ),
                draft_length=0,
                sampling=row.sampling,
                base_length=row.base_length,
            )
            for row in rows
        ]
        return self._launch(sequences, tap, after.last_drawn()[[row.index for row in rows]])

    def _launch(
        self,
        sequences: Sequence[SequenceStep],
        tap: Tap | None,
        sources: npt.NDArray[np.int32] | None,
    ) -> "GpuStep":
        """`sources`: places in the last step's results of the first rows' tokens."""
        self._check(sequences)
        assert tap is None or isinstance(tap, GpuFeatureTap)
        torch.cuda.set_device(self._device)
        graph = self._graph_for(sequences)
        with torch.inference_mode():
            if graph is None:
                shape = ragged_shape(sequences, self.bounds.max_pages_each)
                inputs = StepInputs(shape, self.memory.inputs)
                host = HostInputs(shape, self.memory.pinned_inputs)
                filled = self._prepare(host, inputs, self._ragged_attention, sequences, sources)
                logits = run_step(self.decoder, self.memory, inputs, self._ragged_attention)
            else:
                inputs, logits = graph.inputs, graph.logits
                filled = self._prepare(graph.host, inputs, graph.attention, sequences, sources)
                graph.graph.replay()
            if any(one.ruled is not None for one in sequences):
                # Before they are truncated; those with rules are drawn from on the host.
                logits_of_rules = logits[: inputs.shape.num_logits].clone()
            else:
                logits_of_rules = None
            if any(one.sampling is not None and one.sampling.is_truncated for one in sequences):
                self._truncate(inputs, logits, sequences)
                draw(self.memory, inputs, logits)
            shape = inputs.shape
            count = shape.num_logits + shape.num_sequences
            results = next(self._host_results)
            results.numbers[:count].copy_(self.memory.results[:count], non_blocking=True)
            features = None if tap is None else tap.launch(shape.num_rows)
        results.done.record()
        return GpuStep(
            sequences=sequences,
            shape=shape,
            filled=filled,
            results=results,
            logits=logits,
            logits_of_rules=logits_of_rules,
            features=features,
        )

    def make_tap(self, data: bytes) -> GpuFeatureTap:
        torch.cuda.set_device(self._device)
        decoder, bounds = self.decoder, self.bounds
        hidden_size = decoder.config.hidden_size
        projection = load_projection(
            data,
            hidden_size=hidden_size,
            dtype=decoder.cache.dtype,
            placement=DevicePlacement(self._device),
        )
        assert decoder.capture is not None
        return GpuFeatureTap(
            projection,
            FeatureStore(
                num_blocks=decoder.cache.num_blocks,
                block_size=bounds.block_size,
                width=projection.width,
            ),
            decoder.capture,
            hidden_size=hidden_size,
        )

    def _graph_for(self, sequences: Sequence[SequenceStep]) -> StepGraph | None:
        """The smallest graph that holds the step; None where a prompt chunk is in it."""
        rows_each = 0
        for sequence in sequences:
            count = len(sequence.rows.token_ids)
            if count != sequence.rows.num_logits:
                return None
            rows_each = max(rows_each, count)
        for count in self._counts:
            if count >= len(sequences):
                return self.graphs.get((count, rows_each))
        return None

    def _prepare(
        self,
        host: HostInputs,
        inputs: StepInputs,
        attention: FlashInferAttention,
        sequences: Sequence[SequenceStep],
        sources: npt.NDArray[np.int32] | None,
    ) -> Filled:
        memory, bounds = self.memory, self.bounds
        memory.inputs_taken.synchronize()
        filled = fill(
            host,
            sequences,
            block_size=bounds.block_size,
            max_position=bounds.max_sequence_length - 1,
        )
        if sources is not None:
            host.token_sources[: len(sources)] = sources
        attention.plan(host_pages(filled), pages_of(inputs), num_rows=inputs.shape.num_rows)
        count = host.size_with(filled.num_pages)
        memory.inputs[:count].copy_(memory.pinned_inputs[:count], non_blocking=True)
        memory.inputs_taken.record()
        if sources is not None:
            drawn = memory.results.index_select(0, inputs.token_sources[: len(sources)])
            # Where nothing could be drawn, that step's verdict says so; any row will do here.
            torch.clamp(drawn, min=0, out=inputs.token_ids[: len(sources)])
        return filled

    def _truncate(
        self, inputs: StepInputs, logits: torch.Tensor, sequences: Sequence[SequenceStep]
    ) -> None:
        shape = inputs.shape
        top_k = np.zeros(shape.num_sequences, dtype=np.int64)
        top_p = np.ones(shape.num_sequences)
        min_p = np.zeros(shape.num_sequences)
        for index, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sampling is not None:
                top_k[index], top_p[index] = sampling.top_k, sampling.top_p
                min_p[index] = sampling.min_p

        def of_rows(values: npt.NDArray[np.generic]) -> torch.Tensor:
            return placed(torch.from_numpy(values.repeat(shape.num_drawn)), self._device)

        truncate_(logits, inputs.temperatures, of_rows(top_k), of_rows(top_p), of_rows(min_p))

    def _check(self, sequences: Sequence[SequenceStep]) -> None:
        bounds = self.bounds
        if not sequences:
            raise StepError("a step needs at least one sequence")
        if len(sequences) > bounds.max_sequences:
            raise StepError(
                f"a step of {len(sequences)} sequences: must be at most {bounds.max_sequences}"
            )
        num_drawn = max(sequence.rows.num_logits for sequence in sequences)
        if len(sequences) * num_drawn > bounds.most_logits:
            raise StepError(
                f"a step of {len(sequences)} sequences with up to {num_drawn} rows of logits: must "
                f"be at most {bounds.most_logits} rows in all"
            )
        num_rows = 0
        for sequence in sequences:
            rows = sequence.rows
            num_rows += len(rows.token_ids)
            end = rows.start + len(rows.token_ids)
            if end > bounds.max_sequence_length:
                raise StepError(
                    f"sequence length is {end}: must be at most {bounds.max_sequence_length}"
                )
            if len(rows.block_table) * bounds.block_size < end:
                raise StepError(
                    f"block table of {len(rows.block_table)} blocks: must cover {end} tokens"
                )
            if sequence.draft_length > bounds.max_draft_length:
                raise StepError(
                    f"draft length is {sequence.draft_length}: must be at most "
                    f"{bounds.max_draft_length}"
                )
        if num_rows > bounds.max_step_rows:
            raise StepError(f"a step of {num_rows} rows: must be at most {bounds.max_step_rows}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """A step that the device works on."""

    sequences: Sequence[SequenceStep]
    shape: StepShape
    filled: Filled
    results: StepResults
    logits: torch.Tensor  # on the device, until the next step
    logits_of_rules: torch.Tensor | None  # on the device; None: no sequence has rules
    features: RunningFeatures | None

    def verdicts(self) -> list[Verdict]:
        self.results.done.synchronize()
        shape, numbers = self.shape, self.results.numbers.numpy()
        drawn = numbers[: shape.num_logits].reshape(shape.num_sequences, shape.num_drawn)
        accepted = numbers[shape.num_logits : shape.num_logits + shape.num_sequences]
        if self.features is not None:
            self.features.keep(self.filled.own_rows, self.filled.own_slots)
        verdicts = []
        for index, sequence in enumerate(self.sequences):
            if sequence.sampling is None:
                continue
            if sequence.ruled is not None:
                verdicts.append(self._verdict_of_rules(index, sequence))
                continue
            length = int(accepted[index])
            token_id = int(drawn[index, length])
            if token_id == NO_TOKEN:
                raise LogitsError(
                    f"the largest logit at position {sequence.base_length + length} is not finite"
                )
            verdicts.append(Verdict(accepted_length=length, bonus_token_id=token_id))
        return verdicts

    def last_tokens(self) -> list[int]:
        """What the last row of every sequence drew, NO_TOKEN where its logits are not finite.
        Waits until they are there; instead of `verdicts`, for steps without features.
        """
        self.results.done.synchronize()
        tokens: list[int] = self.results.numbers.numpy()[self.last_drawn()].tolist()
        return tokens

    def last_drawn(self) -> npt.NDArray[np.int32]:
        """Where among the results these are, int32 [sequences]."""
        last = [max(one.rows.num_logits, 1) - 1 for one in self.sequences]
        first = np.arange(len(last), dtype=np.int32) * self.shape.num_drawn
        return first + np.array(last, dtype=np.int32)

    def _verdict_of_rules(self, index: int, sequence: SequenceStep) -> Verdict:
        """Drawn on the host, as on a CPU: a few rows of logits travel for it."""
        assert self.logits_of_rules is not None
        first = index * self.shape.num_drawn
        rows = self.logits_of_rules[first : first + sequence.rows.num_logits]
        return verdict_of(sequence, rows.float().cpu().numpy())
