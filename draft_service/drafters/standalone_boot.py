"""Boots the standalone drafter: its checkpoint, tokenizer and engine. Imports torch."""

from dataclasses import dataclass

from draft_service.config import DraftConfig
from draft_service.drafters.small_model_drafter import SmallModelDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from draft_service.handshake import DraftIdentity
from outrider.engine.boot import BootReport, CpuEngine, Engine, Stage
from outrider.engine.config import EngineConfig
from outrider.engine.devices import boot_engine
from outrider.engine.first_decode import step_milliseconds
from outrider.serving.errors import ConfigurationError
from outrider.serving.model_source import resolve_model
from outrider.serving.tokenizer import load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneBooted:
    """A drafter over an engine that has decoded."""

    drafter: SmallModelDrafter
    identity: DraftIdentity
    device: str
    limits: dict[str, str]


def boot_standalone_drafter(config: DraftConfig, report: BootReport) -> StandaloneBooted:
    """Raises ConfigurationError where the tokenizers differ, ModelNotFound, EngineError, or what
    a tokenizer raises.
    """
    report.enter(Stage.CONFIG)
    source = resolve_model(config.draft_model)
    tokenizer_sha256 = load_tokenizer(source.path).sha256
    if config.model:
        _check_tokenizer(config, tokenizer_sha256)
    engine = boot_engine(
        EngineConfig(
            model_path=source.path,
            dtype=config.dtype,
            device=config.device,
            kv_cache_bytes=config.kv_cache_mib * 2**20,
            max_draft_length=max(config.max_draft_length, 1),
        ),
        report,
    )
    return StandaloneBooted(
        drafter=drafter_over(engine),
        identity=DraftIdentity(
            vocab_size=engine.model_config.vocab_size,
            tokenizer_sha256=tokenizer_sha256,
            eos_token_ids=tuple(engine.model_config.eos_token_ids),
        ),
        device=engine.device,
        limits={
            "dtype": engine.dtype,
            "kv_blocks": str(engine.limits.num_blocks - 1),
            "block_size": str(engine.limits.block_size),
            "step_milliseconds": step_milliseconds(engine.limits.step_seconds),
        },
    )


def drafter_over(engine: Engine) -> SmallModelDrafter:
    """A drafter with an engine of its own."""
    if isinstance(engine, CpuEngine):
        return StandaloneDrafter(
            runner=engine.runner,
            block_pool=engine.block_pool,
            eos_token_ids=frozenset(engine.model_config.eos_token_ids),
            fingerprint=engine.fingerprint,
            step_seconds=engine.limits.step_seconds,
        )
    # Imported here: its libraries are there only where there is a GPU.
    from draft_service.drafters.standalone_graphs import StandaloneGraphDrafter
    from outrider.engine.gpu.step_chains import StepChains
    from outrider.engine.gpu.steps import GpuSteps

    assert isinstance(engine.steps, GpuSteps)
    return StandaloneGraphDrafter(
        chains=StepChains(engine.steps),
        block_pool=engine.block_pool,
        eos_token_ids=frozenset(engine.model_config.eos_token_ids),
        fingerprint=engine.fingerprint,
        step_seconds=engine.limits.step_seconds,
    )


def _check_tokenizer(config: DraftConfig, tokenizer_sha256: str) -> None:
    target_sha256 = load_tokenizer(resolve_model(config.model).path).sha256
    if target_sha256 != tokenizer_sha256:
        raise ConfigurationError(
            f"draft_model {config.draft_model!r} has tokenizer {tokenizer_sha256}, "
            f"must be the tokenizer {target_sha256} of model {config.model!r}"
        )
