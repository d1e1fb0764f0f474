"""Builds a head that has run: a straight line of stages, each a function of the earlier results."""

from dataclasses import dataclass
from pathlib import Path

from outrider.engine.attention.cpu_probe import build_cpu_attention
from outrider.engine.boot import BootReport, Stage, make_kv_cache, read_model
from outrider.engine.config import EngineConfig, resolve_dtype, validate
from outrider.engine.eagle3.first_extend import FirstExtend, extend_once, measure_head_steps
from outrider.engine.eagle3.head import Eagle3Head
from outrider.engine.eagle3.head_config import read_head_config
from outrider.engine.eagle3.head_runner import HeadRunner
from outrider.engine.eagle3.head_weights import TargetCheckpoint, load_head
from outrider.engine.kv_cache import BlockPool
from outrider.engine.model_config import ModelConfig
from outrider.engine.rope import rotation_table


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadEngine:
    """A head that has run, with everything needed to run steps on it."""

    target_config: ModelConfig
    runner: HeadRunner
    block_pool: BlockPool
    first_extend: FirstExtend
    step_seconds: tuple[tuple[int, float], ...]  # (rows of one token each, seconds), ascending
    dtype: str
    device: str


def boot_head(config: EngineConfig, head_directory: Path, report: BootReport) -> HeadEngine:
    """Load, check and try a head for the target at config.model_path, of which the embedding alone
    is loaded. The stage `config` has been entered. Raises EngineError naming what is wrong.
    """
    validate(config)
    dtype = resolve_dtype(config.dtype)
    target_config, target_source = read_model(config.model_path)
    head_config = read_head_config(head_directory, target_config)
    report.note(
        f"EAGLE-3 head of width {head_config.hidden_size}, {head_config.draft_vocab_size} of "
        f"{head_config.layer.vocab_size} token ids, {head_config.feature_layers.words()}, {dtype}"
    )

    report.enter(Stage.WEIGHTS)
    target = TargetCheckpoint(config=target_config, source=target_source)
    weights = load_head(head_config, head_directory, target, dtype)

    # Positions of the target: what a head was trained with says nothing of how far rotations reach.
    kv_cache, max_sequence_length = make_kv_cache(
        config, cached=head_config.layer, served=target_config, dtype=dtype, report=report
    )

    report.enter(Stage.ATTENTION)
    layer = head_config.layer
    rotations = rotation_table(
        layer.head_dim, layer.rope_theta, layer.rope_scaling, max_sequence_length
    )
    runner = HeadRunner(
        head=Eagle3Head(config=head_config, weights=weights, rotations=rotations),
        attention=build_cpu_attention(layer, kv_cache),
        block_size=kv_cache.block_size,
        max_sequence_length=max_sequence_length,
        max_step_rows=config.max_step_rows,
    )

    report.skip(Stage.GRAPHS, "a CPU has no graphs to capture")

    report.enter(Stage.FIRST_DECODE)
    block_pool = BlockPool(kv_cache.num_blocks)
    first_extend = extend_once(runner, block_pool)
    step_seconds = measure_head_steps(runner, block_pool)
    report.note(first_extend.compared)

    return HeadEngine(
        target_config=target_config,
        runner=runner,
        block_pool=block_pool,
        first_extend=first_extend,
        step_seconds=step_seconds,
        dtype=str(dtype).removeprefix("torch."),
        device=config.device,
    )
