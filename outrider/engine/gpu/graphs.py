"""Captures a graph for every shape of a decode or verify step: the plain path has its own."""

import time
from collections.abc import Callable
from typing import Any

import torch

from outrider.engine.gpu.decoder import GpuDecoder
from outrider.engine.gpu.flashinfer_attention import FlashInferAttention
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.step_inputs import HostInputs, StepInputs, fill, rectangle_shape
from outrider.engine.gpu.steps import (
    StepGraph,
    StepMemory,
    host_pages,
    pages_of,
    run_step,
)


def capture_graphs(
    decoder: GpuDecoder,
    bounds: StepBounds,
    memory: StepMemory,
    note: Callable[[str], None],
) -> dict[tuple[int, int], StepGraph]:
    """A graph by (sequences, rows of each), the largest first, so that the others find their
    memory in its pool. Whatever a capture raises goes through.
    """
    graphs: dict[tuple[int, int], StepGraph] = {}
    pool = torch.cuda.graph_pool_handle()
    started = time.perf_counter()
    for count, rows_each in bounds.buckets:
        graphs[count, rows_each] = _capture(decoder, bounds, memory, pool, count, rows_each)
        if len(graphs) % 10 == 0:
            note(f"{len(graphs)} of {len(bounds.buckets)} graphs")
    torch.cuda.synchronize(memory.device)
    lengths = bounds.max_draft_length
    note(
        f"{len(graphs)} graphs in {time.perf_counter() - started:.1f} s: plain and with drafts of "
        f"1 to {lengths} tokens, for up to {bounds.max_sequences} sequences"
        if lengths
        else f"{len(graphs)} graphs of plain steps, for up to {bounds.max_sequences} sequences"
    )
    return graphs


def _capture(
    decoder: GpuDecoder,
    bounds: StepBounds,
    memory: StepMemory,
    pool: Any,
    count: int,
    rows_each: int,
) -> StepGraph:
    shape = rectangle_shape(count, rows_each, bounds.max_pages_each)
    inputs = StepInputs(shape, memory.inputs)
    attention = FlashInferAttention(
        decoder.config,
        decoder.cache,
        memory.attention,
        captured=pages_of(inputs),
        captured_rows=shape.num_rows,
    )
    host = HostInputs(shape, memory.pinned_inputs)
    # Sequences of padding only: what they compute goes to the padding block.
    filled = fill(host, (), block_size=bounds.block_size, max_position=0)
    attention.plan(host_pages(filled), pages_of(inputs), num_rows=shape.num_rows)
    memory.inputs[: shape.size].copy_(memory.pinned_inputs[: shape.size])
    with torch.inference_mode():
        # Once outside: kernels are compiled and libraries make their workspaces.
        run_step(decoder, memory, inputs, attention)
        torch.cuda.synchronize(memory.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = run_step(decoder, memory, inputs, attention)
    return StepGraph(host=host, inputs=inputs, attention=attention, graph=graph, logits=logits)
