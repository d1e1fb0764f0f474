"""Builds a head on a GPU that has drafted: the stages of `outrider.engine.eagle3.boot`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.boot import (
    USUAL_KV_CACHE_BYTES,
    BootReport,
    Stage,
    read_model,
    resolve_sequence_length,
)
from outrider.engine.config import EngineConfig, validate
from outrider.engine.eagle3.head_config import read_head_config
from outrider.engine.eagle3.head_weights import TargetCheckpoint, load_head
from outrider.engine.errors import InvarianceError
from outrider.engine.first_decode import measure_rows
from outrider.engine.gpu.boot import gpu_dtype
from outrider.engine.gpu.chain_inputs import Chain, ChainBounds
from outrider.engine.gpu.device import find_device
from outrider.engine.gpu.head import GpuHead
from outrider.engine.gpu.head_chains import HeadChains
from outrider.engine.gpu.kv_cache import allocate_gpu_kv_cache
from outrider.engine.gpu.memory import named_out_of_memory
from outrider.engine.kv_cache import BlockPool
from outrider.engine.model_config import ModelConfig
from outrider.engine.placement import DevicePlacement
from outrider.engine.rope import rotation_table
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHeadEngine:
    """A head that has drafted, with everything needed to draft on."""

    target_config: ModelConfig
    chains: HeadChains
    block_pool: BlockPool
    first_drafts: str  # what was compared
    step_seconds: tuple[tuple[int, float], ...]  # (sequences, seconds of a whole draft), ascending
    dtype: str
    device: str


def boot_gpu_head(config: EngineConfig, head_directory: Path, report: BootReport) -> GpuHeadEngine:
    """Load, capture and try a head for the target at config.model_path, of which the embedding
    alone is loaded. The stage `config` has been entered. Raises EngineError naming what is wrong.
    """
    validate(config)
    device = find_device(config.device)
    torch.cuda.set_device(device)
    dtype = gpu_dtype(config.dtype)
    target_config, target_source = read_model(config.model_path)
    head_config = read_head_config(head_directory, target_config)
    report.note(
        f"EAGLE-3 head of width {head_config.hidden_size}, {head_config.draft_vocab_size} of "
        f"{head_config.layer.vocab_size} token ids, {head_config.feature_layers.words()}, {dtype}, "
        f"{torch.cuda.get_device_name(device)}"
    )

    report.enter(Stage.WEIGHTS)
    with named_out_of_memory(Stage.WEIGHTS, device):
        weights = load_head(
            head_config,
            head_directory,
            TargetCheckpoint(config=target_config, source=target_source),
            dtype,
            DevicePlacement(device),
        )

    report.enter(Stage.KV_CACHE)
    layer = head_config.layer
    with named_out_of_memory(Stage.KV_CACHE, device):
        cache = allocate_gpu_kv_cache(
            layer,
            kv_cache_bytes=config.kv_cache_bytes or USUAL_KV_CACHE_BYTES,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
        )
    max_sequence_length = resolve_sequence_length(
        config, target_config, num_blocks=cache.num_blocks, block_size=cache.block_size
    )
    report.note(
        f"{cache.num_blocks} blocks of {cache.block_size} tokens, "
        f"sequences of up to {max_sequence_length}"
    )

    report.enter(Stage.ATTENTION)
    rotations = torch.view_as_real(
        rotation_table(layer.head_dim, layer.rope_theta, layer.rope_scaling, max_sequence_length)
    )
    with named_out_of_memory(Stage.ATTENTION, device):
        chains = HeadChains(
            GpuHead(
                config=head_config,
                weights=weights,
                rotations=rotations.contiguous().to(device),
                cache=cache,
            ),
            ChainBounds(
                block_size=cache.block_size,
                max_sequence_length=max_sequence_length,
                max_step_rows=config.max_step_rows,
                max_sequences=config.max_sequences,
                max_draft_length=config.max_draft_length,
            ),
            device,
        )

    report.enter(Stage.GRAPHS)
    with named_out_of_memory(Stage.GRAPHS, device):
        chains.capture()
    report.note(
        f"{len(chains.graphs)} graphs: drafts of 1 to {config.max_draft_length} tokens for up to "
        f"{config.max_sequences} sequences"
    )

    report.enter(Stage.FIRST_DECODE)
    block_pool = BlockPool(cache.num_blocks)
    with named_out_of_memory(Stage.FIRST_DECODE, device):
        first_drafts = compare_drafts(chains, block_pool)
        step_seconds = measure_drafts(chains, block_pool)
    report.note(first_drafts)

    return GpuHeadEngine(
        target_config=target_config,
        chains=chains,
        block_pool=block_pool,
        first_drafts=first_drafts,
        step_seconds=step_seconds,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )


def compare_drafts(chains: HeadChains, block_pool: BlockPool) -> str:
    """Drafts with every graph and with single launches; InvarianceError where they differ."""
    bounds = chains.bounds
    blocks_each = -(-(1 + bounds.max_draft_length) // bounds.block_size)
    most = min(bounds.max_sequences, block_pool.num_free // blocks_each)
    blocks = block_pool.allocate(most * blocks_each)
    tables = [blocks[first : first + blocks_each] for first in range(0, len(blocks), blocks_each)]
    try:
        for (count, steps), graph in chains.graphs.items():
            asked = _asked(chains, tables[:count], steps)
            drafts = chains.draft(asked)
            with torch.inference_mode():
                chains.run_chain(graph.inputs, steps)
            launched = chains.drawn(count, steps)[:, : len(asked)].T.tolist()
            if drafts != launched:
                raise InvarianceError(
                    f"graph of {count} sequences and {steps} draft tokens: drafted other tokens "
                    "than single launches"
                )
            if min(map(len, drafts)) < steps:
                raise InvarianceError(
                    f"graph of {count} sequences and {steps} draft tokens: logits are not finite"
                )
    finally:
        block_pool.release(blocks)
    return f"{len(chains.graphs)} graphs draft what single launches do"


def measure_drafts(chains: HeadChains, block_pool: BlockPool) -> tuple[tuple[int, float], ...]:
    """Seconds of a whole draft of so many sequences, the least of a few."""

    bounds = chains.bounds

    def draft_over(blocks: Sequence[int]) -> Callable[[], object]:
        # One block each, and drafts that end in it.
        tables = [[block] for block in blocks]
        asked = _asked(chains, tables, min(bounds.max_draft_length, bounds.block_size - 1))
        return lambda: chains.draft(asked)

    return measure_rows(draft_over, block_pool, chains.bounds.max_sequences)


def _asked(chains: HeadChains, tables: Sequence[Sequence[int]], draft_length: int) -> list[Chain]:
    """One row each, of random features."""
    config = chains.head.config
    generator = torch.Generator().manual_seed(0)
    dtype = chains.head.cache.dtype
    features = torch.randn(len(tables), 1, config.hidden_size, generator=generator).to(dtype)
    return [
        Chain(
            rows=SequenceRows(
                token_ids=[(7 + 31 * index) % config.layer.vocab_size],
                start=0,
                block_table=table,
                num_logits=1,
            ),
            features=features[index],
            sampling=GREEDY,
            first_position=2,
            draft_length=draft_length,
        )
        for index, table in enumerate(tables)
    ]
