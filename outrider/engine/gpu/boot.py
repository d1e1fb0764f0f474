"""Builds an engine on a GPU: the stages of `outrider.engine.boot`, graphs among them."""

from dataclasses import replace

import torch

from outrider.engine.boot import (
    BootReport,
    Engine,
    EngineLimits,
    Stage,
    read_model,
    resolve_sequence_length,
)
from outrider.engine.config import DTYPES, EngineConfig, resolve_feature_layers, validate
from outrider.engine.errors import ConfigError
from outrider.engine.gpu.decoder import Capture, GpuDecoder
from outrider.engine.gpu.device import find_device
from outrider.engine.gpu.first_decode import decode_once, measure_steps
from outrider.engine.gpu.flashinfer_attention import FlashInferAttention
from outrider.engine.gpu.graphs import capture_graphs
from outrider.engine.gpu.kv_cache import GpuKvCache, allocate_gpu_kv_cache
from outrider.engine.gpu.memory import MIB, cache_bytes, find_room, named_out_of_memory
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.steps import GpuSteps, StepMemory
from outrider.engine.kv_cache import BlockPool
from outrider.engine.model_config import ModelConfig
from outrider.engine.placement import DevicePlacement
from outrider.engine.rope import rotation_table
from outrider.engine.weights import DecoderWeights, load_weights


def boot_gpu(config: EngineConfig, report: BootReport) -> Engine:
    """Load, capture, check and try a model; raises EngineError naming what is wrong."""
    report.enter(Stage.CONFIG)
    validate(config)
    device = find_device(config.device)
    torch.cuda.set_device(device)
    dtype = gpu_dtype(config.dtype)
    model_config, source = read_model(config.model_path)
    feature_layers = resolve_feature_layers(config.feature_layers, model_config.num_layers)
    name = torch.cuda.get_device_name(device)
    report.note(f"{model_config.family}, {model_config.num_layers} layers, {dtype}, {name}")

    report.enter(Stage.WEIGHTS)
    with named_out_of_memory(Stage.WEIGHTS, device):
        weights = load_weights(model_config, source, dtype, report.note, DevicePlacement(device))

    return boot_weights(config, model_config, weights, feature_layers, device, report)


def boot_weights(
    config: EngineConfig,
    model_config: ModelConfig,
    weights: DecoderWeights,
    feature_layers: tuple[int, ...],
    device: torch.device,
    report: BootReport,
) -> Engine:
    """The stages behind the weights, which are on the device."""
    dtype = weights.embedding.weight.dtype
    report.enter(Stage.KV_CACHE)
    bounds = StepBounds(
        block_size=config.block_size,
        max_sequence_length=config.max_sequence_length or model_config.max_position_embeddings,
        max_step_rows=config.max_step_rows,
        max_sequences=config.max_sequences,
        max_draft_length=config.max_draft_length,
    )
    with named_out_of_memory(Stage.KV_CACHE, device):
        size, why = config.kv_cache_bytes, "as configured"
        if size is None:
            room = find_room(
                model_config,
                bounds,
                num_feature_layers=len(feature_layers),
                dtype=dtype,
                device=device,
            )
            size, why = cache_bytes(room, model_config, bounds, dtype), room.words()
        cache = allocate_gpu_kv_cache(
            model_config,
            kv_cache_bytes=size,
            block_size=config.block_size,
            dtype=dtype,
            device=device,
        )
    max_sequence_length = resolve_sequence_length(
        config, model_config, num_blocks=cache.num_blocks, block_size=cache.block_size
    )
    bounds = replace(bounds, max_sequence_length=max_sequence_length)
    report.note(
        f"{size // MIB} MiB, {why}: {cache.num_blocks} blocks of {cache.block_size} tokens, "
        f"sequences of up to {max_sequence_length}"
    )

    report.enter(Stage.ATTENTION)
    with named_out_of_memory(Stage.ATTENTION, device):
        decoder = build_gpu_decoder(
            model_config, weights, cache, max_sequence_length, feature_layers, bounds.most_rows
        )
        memory = StepMemory(bounds, vocab_size=model_config.vocab_size, dtype=dtype, device=device)
        ragged_attention = FlashInferAttention(model_config, cache, memory.attention)
    report.note("FlashInfer, planned once a step")

    report.enter(Stage.GRAPHS)
    with named_out_of_memory(Stage.GRAPHS, device):
        graphs = capture_graphs(decoder, bounds, memory, report.note)

    report.enter(Stage.FIRST_DECODE)
    steps = GpuSteps(
        decoder=decoder,
        bounds=bounds,
        memory=memory,
        graphs=graphs,
        ragged_attention=ragged_attention,
    )
    block_pool = BlockPool(cache.num_blocks)
    with named_out_of_memory(Stage.FIRST_DECODE, device):
        first_decode = decode_once(steps, block_pool)
        step_seconds = measure_steps(steps, block_pool)
    report.note(first_decode.compared)

    return Engine(
        model_config=model_config,
        limits=EngineLimits(
            num_blocks=cache.num_blocks,
            block_size=cache.block_size,
            max_sequence_length=max_sequence_length,
            max_step_rows=config.max_step_rows,
            kv_granularity=cache.block_size,
            step_seconds=step_seconds,
        ),
        steps=steps,
        ahead=steps,
        rounding_depends_on_rows=True,
        feature_layers=feature_layers,
        block_pool=block_pool,
        first_decode=first_decode,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        fingerprint=weights.fingerprint,
    )


def gpu_dtype(name: str) -> torch.dtype:
    """The torch dtype of a validated name; raises ConfigError for one without attention kernels."""
    dtype = torch.bfloat16 if name == "auto" else DTYPES[name]
    if dtype is not torch.bfloat16:
        raise ConfigError(f"dtype is {name!r}: must be bfloat16 or auto on a GPU")
    return dtype


def build_gpu_decoder(
    config: ModelConfig,
    weights: DecoderWeights,
    cache: GpuKvCache,
    max_sequence_length: int,
    feature_layers: tuple[int, ...],
    most_rows: int,
) -> GpuDecoder:
    """A loaded model over a cache, with the rotations of every position that it will serve."""
    device = cache.keys.device
    rotations = torch.view_as_real(
        rotation_table(config.head_dim, config.rope_theta, config.rope_scaling, max_sequence_length)
    )
    return GpuDecoder(
        config=config,
        weights=weights,
        rotations=rotations.contiguous().to(device),
        cache=cache,
        capture=Capture(
            rows=torch.zeros(
                most_rows,
                len(feature_layers) * config.hidden_size,
                dtype=cache.dtype,
                device=device,
            ),
            layer_ids=feature_layers,
        ),
    )
