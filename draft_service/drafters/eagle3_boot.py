"""Boots the EAGLE-3 drafter: a head and what it needs of its target's checkpoint. Imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draft_service.config import DraftConfig
from draft_service.drafters.eagle3 import Eagle3Drafter
from draft_service.drafters.head_drafter import HeadDrafter
from draft_service.handshake import DraftIdentity
from outrider.engine.boot import BootReport, Stage
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.boot import HeadEngine, boot_head
from outrider.engine.eagle3.head_config import TARGET_RECORD, Eagle3Config, read_recorded_target
from outrider.engine.eagle3.head_weights import HeadWeights
from outrider.engine.errors import ConfigError
from outrider.engine.first_decode import step_milliseconds
from outrider.engine.gpu.device import find_device
from outrider.engine.model_config import ModelConfig
from outrider.serving.errors import ConfigurationError
from outrider.serving.model_source import resolve_model
from outrider.serving.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Booted:
    """A drafter over a head that has run."""

    drafter: HeadDrafter
    identity: DraftIdentity
    device: str
    limits: dict[str, str]


def boot_eagle3_drafter(config: DraftConfig, report: BootReport) -> Eagle3Booted:
    """The head of draft_model for the target `model`, whose vocabulary, tokenizer, length and
    embedding it takes.

    Raises ConfigurationError, ModelNotFound, EngineError, or what a tokenizer raises.
    """
    report.enter(Stage.CONFIG)
    if not config.model:
        raise ConfigurationError("model is '', must name the target of the head in draft-model")
    head = resolve_model(config.draft_model).path
    if not head.is_dir():
        raise ConfigurationError(
            f"draft-model is {config.draft_model!r}, must be the directory of an EAGLE-3 head"
        )
    target = resolve_model(config.model).path
    tokenizer_sha256 = load_tokenizer(target).sha256
    recorded = read_recorded_target(head)
    if recorded is not None and recorded.tokenizer_sha256 != tokenizer_sha256:
        raise ConfigError(
            f"config.json: {TARGET_RECORD}.tokenizer_sha256 is {recorded.tokenizer_sha256} (of "
            f"{recorded.name}): must be the target's, {tokenizer_sha256}"
        )
    engine_config = EngineConfig(
        model_path=target,
        dtype=config.dtype,
        device=config.device,
        kv_cache_bytes=config.kv_cache_mib * 2**20,
        max_draft_length=max(config.max_draft_length, 1),
    )
    if config.device != "cpu":
        return _boot_on_gpu(config, engine_config, head, tokenizer_sha256, report)
    engine = boot_head(engine_config, head, report)
    return Eagle3Booted(
        drafter=drafter_over(
            engine, window=config.draft_window, min_probability=config.draft_min_probability
        ),
        identity=_identity(engine.target_config, tokenizer_sha256),
        device=engine.device,
        limits=_limits(
            engine.runner.head.config,
            engine.runner.head.weights,
            dtype=engine.dtype,
            num_blocks=engine.block_pool.num_blocks,
            block_size=engine.runner.block_size,
            step_seconds=engine.step_seconds,
        ),
    )


def _boot_on_gpu(
    config: DraftConfig,
    engine_config: EngineConfig,
    head: Path,
    tokenizer_sha256: str,
    report: BootReport,
) -> Eagle3Booted:
    # Before the imports, whose own words for a missing library name no remedy.
    find_device(config.device)
    # Imported here: their libraries are there only where there is a GPU.
    from draft_service.drafters.eagle3_graphs import Eagle3GraphDrafter
    from outrider.engine.gpu.head_boot import boot_gpu_head

    engine = boot_gpu_head(engine_config, head, report)
    chains = engine.chains
    return Eagle3Booted(
        drafter=Eagle3GraphDrafter(
            chains=chains,
            block_pool=engine.block_pool,
            eos_token_ids=frozenset(engine.target_config.eos_token_ids),
            step_seconds=engine.step_seconds,
            window=config.draft_window,
        ),
        identity=_identity(engine.target_config, tokenizer_sha256),
        device=engine.device,
        limits=_limits(
            chains.head.config,
            chains.head.weights,
            dtype=engine.dtype,
            num_blocks=engine.block_pool.num_blocks,
            block_size=chains.bounds.block_size,
            step_seconds=engine.step_seconds,
        ),
    )


def _identity(target: ModelConfig, tokenizer_sha256: str) -> DraftIdentity:
    return DraftIdentity(
        vocab_size=target.vocab_size,
        tokenizer_sha256=tokenizer_sha256,
        eos_token_ids=tuple(target.eos_token_ids),
    )


def drafter_over(
    engine: HeadEngine, *, window: int = 0, min_probability: float = 0.0
) -> Eagle3Drafter:
    """A drafter with a head of its own."""
    return Eagle3Drafter(
        runner=engine.runner,
        block_pool=engine.block_pool,
        eos_token_ids=frozenset(engine.target_config.eos_token_ids),
        step_seconds=engine.step_seconds,
        window=window,
        min_probability=min_probability,
    )


def _limits(
    config: Eagle3Config,
    weights: HeadWeights,
    *,
    dtype: str,
    num_blocks: int,
    block_size: int,
    step_seconds: Sequence[tuple[int, float]],
) -> dict[str, str]:
    return {
        "dtype": dtype,
        "kv_blocks": str(num_blocks - 1),
        "block_size": str(block_size),
        "step_milliseconds": step_milliseconds(step_seconds),
        "draft_vocabulary": f"{config.draft_vocab_size} of {config.layer.vocab_size}",
        "features": config.feature_layers.words(),
        "feature_rows": f"{config.hidden_size} numbers, "
        f"{str(weights.row_dtype).removeprefix('torch.')}",
    }
