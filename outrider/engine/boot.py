"""Builds an engine: a straight line of stages, each a function of the earlier stages' results.

An `Engine` has decoded before it exists; there is no other way to get one.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import torch

from outrider.engine.attention.cpu_probe import build_cpu_attention
from outrider.engine.config import EngineConfig, resolve_dtype, resolve_feature_layers, validate
from outrider.engine.cpu_steps import CpuSteps
from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.first_decode import FirstDecode, decode_once, measure_steps
from outrider.engine.gguf_source import open_gguf, read_gguf_config
from outrider.engine.hf_config import read_hf_config
from outrider.engine.invariance import check_steps, find_row_rule
from outrider.engine.kv_cache import BlockPool, KvCache, allocate_kv_cache
from outrider.engine.model import Decoder
from outrider.engine.model_config import ModelConfig
from outrider.engine.rope import rotation_table
from outrider.engine.runner import Runner
from outrider.engine.tensor_source import TensorSource, open_safetensors
from outrider.engine.verify_step import AheadEngine, StepEngine
from outrider.engine.weights import DecoderWeights, load_weights, with_max_rows


class Stage(StrEnum):
    """The stages of boot, in order."""

    CONFIG = "config"
    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"
    ATTENTION = "attention"
    GRAPHS = "graphs"
    FIRST_DECODE = "first_decode"


class BootReport(Protocol):
    """Hears of boot's progress."""

    def enter(self, stage: str) -> None:
        """A stage begins; the one before it has ended."""
        ...

    def skip(self, stage: str, reason: str) -> None:
        """A stage is entered and has nothing to do."""
        ...

    def note(self, detail: str) -> None:
        """A line of detail on the current stage."""
        ...


# In a processor's memory, where nobody says how much; other programs share it.
USUAL_KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What boot measured on this machine."""

    num_blocks: int  # the padding block included
    block_size: int
    max_sequence_length: int
    max_step_rows: int
    kv_granularity: int
    step_seconds: tuple[tuple[int, float], ...]  # (rows of one token each, seconds), ascending


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A model that has decoded, with everything needed to run steps on it."""

    model_config: ModelConfig
    limits: EngineLimits
    steps: StepEngine
    # Launches steps behind running ones; None where a step has ended once it is launched.
    ahead: AheadEngine | None = None
    # A row's logits differ in their last bits with the number of rows beside it.
    rounding_depends_on_rows: bool
    feature_layers: tuple[int, ...]  # that features may be made of
    block_pool: BlockPool
    first_decode: FirstDecode
    dtype: str
    device: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuEngine(Engine):
    """On a CPU logits can be had as well."""

    runner: Runner


def boot(config: EngineConfig, report: BootReport) -> CpuEngine:
    """Load, check and try a model on the CPU; raises EngineError naming what is wrong."""
    report.enter(Stage.CONFIG)
    validate(config)
    assert config.device == "cpu", config.device
    dtype = resolve_dtype(config.dtype)
    model_config, source = read_model(config.model_path)
    feature_layers = resolve_feature_layers(config.feature_layers, model_config.num_layers)
    report.note(f"{model_config.family}, {model_config.num_layers} layers, {dtype}")

    report.enter(Stage.WEIGHTS)
    weights = load_weights(model_config, source, dtype, report.note)

    kv_cache, max_sequence_length = make_kv_cache(
        config, cached=model_config, served=model_config, dtype=dtype, report=report
    )

    report.enter(Stage.ATTENTION)
    decoder = build_decoder(model_config, weights, max_sequence_length)
    rule = find_row_rule(decoder, config.max_step_rows)
    runner = Runner(
        decoder=replace(decoder, weights=with_max_rows(weights, rule.max_rows)),
        attention=build_cpu_attention(model_config, kv_cache),
        num_blocks=kv_cache.num_blocks,
        block_size=kv_cache.block_size,
        row_multiple=rule.multiple,
        max_sequence_length=max_sequence_length,
        max_step_rows=config.max_step_rows,
    )
    report.note(f"{rule.words()}; {check_steps(runner)}")

    report.skip(Stage.GRAPHS, "a CPU has no graphs to capture")

    report.enter(Stage.FIRST_DECODE)
    block_pool = BlockPool(kv_cache.num_blocks)
    first_decode = decode_once(runner, block_pool)
    step_seconds = measure_steps(runner, block_pool)
    report.note(first_decode.compared)

    return CpuEngine(
        model_config=model_config,
        limits=EngineLimits(
            num_blocks=kv_cache.num_blocks,
            block_size=config.block_size,
            max_sequence_length=max_sequence_length,
            max_step_rows=config.max_step_rows,
            kv_granularity=runner.attention.kv_granularity,
            step_seconds=step_seconds,
        ),
        runner=runner,
        steps=CpuSteps(runner=runner),
        rounding_depends_on_rows=False,
        feature_layers=feature_layers,
        block_pool=block_pool,
        first_decode=first_decode,
        dtype=str(dtype).removeprefix("torch."),
        device=config.device,
        fingerprint=weights.fingerprint,
    )


def read_model(path: Path) -> tuple[ModelConfig, TensorSource]:
    """Description and tensors of a checkpoint: a directory of safetensors, or a .gguf file."""
    if path.is_dir():
        return read_hf_config(path), open_safetensors(path)
    if path.suffix == ".gguf":
        source = open_gguf(path)
        return read_gguf_config(source), source
    raise CheckpointError(f"{path}: must be a directory with config.json or a .gguf file")


def make_kv_cache(
    config: EngineConfig,
    *,
    cached: ModelConfig,
    served: ModelConfig,
    dtype: torch.dtype,
    report: BootReport,
) -> tuple[KvCache, int]:
    """Stage `kv_cache`: the cache of the layers that are computed here, and the longest sequence
    of the model whose positions are served. Raises ConfigError.
    """
    report.enter(Stage.KV_CACHE)
    kv_cache = allocate_kv_cache(
        cached,
        kv_cache_bytes=config.kv_cache_bytes or USUAL_KV_CACHE_BYTES,
        block_size=config.block_size,
        dtype=dtype,
    )
    max_sequence_length = resolve_sequence_length(
        config, served, num_blocks=kv_cache.num_blocks, block_size=kv_cache.block_size
    )
    report.note(
        f"{kv_cache.num_blocks} blocks of {config.block_size} tokens, "
        f"sequences of up to {max_sequence_length}"
    )
    return kv_cache, max_sequence_length


def resolve_sequence_length(
    config: EngineConfig, model_config: ModelConfig, *, num_blocks: int, block_size: int
) -> int:
    """Longest sequence to serve; raises ConfigError where the user asks for more than there is."""
    of_model = model_config.max_position_embeddings
    of_cache = (num_blocks - 1) * block_size
    asked = config.max_sequence_length
    if asked is None:
        return min(of_model, of_cache)
    for bound, what in ((of_model, "the model's positions"), (of_cache, "the KV cache's tokens")):
        if asked > bound:
            raise ConfigError(f"max_sequence_length is {asked}: must be at most {bound}, {what}")
    return asked


def build_decoder(
    config: ModelConfig, weights: DecoderWeights, max_sequence_length: int
) -> Decoder:
    """A loaded model with the rotations of every position that it will serve."""
    rotations = rotation_table(
        config.head_dim, config.rope_theta, config.rope_scaling, max_sequence_length
    )
    return Decoder(config=config, weights=weights, rotations=rotations)
