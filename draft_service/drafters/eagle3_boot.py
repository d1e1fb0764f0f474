"""Boots the EAGLE-3 drafter: a head and what it needs of its target's checkpoint. Imports torch."""

from dataclasses import dataclass

from draft_service.config import DraftConfig
from draft_service.drafters.eagle3 import Eagle3Drafter
from draft_service.handshake import DraftIdentity
from outrider.engine.boot import BootReport, Stage
from outrider.engine.config import EngineConfig
from outrider.engine.eagle3.boot import HeadEngine, boot_head
from outrider.engine.eagle3.head_config import TARGET_RECORD, read_recorded_target
from outrider.engine.errors import ConfigError
from outrider.engine.first_decode import step_milliseconds
from outrider.serving.errors import ConfigurationError
from outrider.serving.model_source import resolve_model
from outrider.serving.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Booted:
    """A drafter over a head that has run."""

    drafter: Eagle3Drafter
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
    engine = boot_head(
        EngineConfig(
            model_path=target,
            dtype=config.dtype,
            device=config.device,
            kv_cache_bytes=config.kv_cache_mib * 2**20,
        ),
        head,
        report,
    )
    return Eagle3Booted(
        drafter=drafter_over(
            engine, window=config.draft_window, min_probability=config.draft_min_probability
        ),
        identity=DraftIdentity(
            vocab_size=engine.target_config.vocab_size,
            tokenizer_sha256=tokenizer_sha256,
            eos_token_ids=tuple(engine.target_config.eos_token_ids),
        ),
        device=engine.device,
        limits=_limits(engine),
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


def _limits(engine: HeadEngine) -> dict[str, str]:
    head = engine.runner.head
    return {
        "dtype": engine.dtype,
        "kv_blocks": str(engine.block_pool.num_blocks - 1),
        "block_size": str(engine.runner.block_size),
        "step_milliseconds": step_milliseconds(engine.step_seconds),
        "draft_vocabulary": f"{head.config.draft_vocab_size} of {head.config.layer.vocab_size}",
        "features": head.config.feature_layers.words(),
        "feature_rows": f"{head.config.hidden_size} numbers, "
        f"{str(head.weights.row_dtype).removeprefix('torch.')}",
    }
