"""The start-up of each drafter: a straight line that ends with a drafter that has proposed."""

from dataclasses import dataclass, field
from typing import Any, Protocol

from draft_service.config import DraftConfig
from draft_service.drafters.drafter import Drafter
from draft_service.drafters.hybrid import HybridDrafter
from draft_service.drafters.ngram_drafter import NgramDrafter
from draft_service.first_draft import FirstDraft, FirstDraftError, first_draft
from draft_service.handshake import DraftIdentity
from outrider.serving.lifecycle import Lifecycle

# The n-gram drafter has no vocabulary; its first draft is made of ids of this one.
NGRAM_FIRST_DRAFT_VOCABULARY = 2**15


class ModelDrafter(Protocol):
    """A drafter over an engine that has computed, with what its token ids mean."""

    @property
    def drafter(self) -> Drafter[Any]: ...

    @property
    def identity(self) -> DraftIdentity: ...

    @property
    def device(self) -> str: ...

    @property
    def limits(self) -> dict[str, str]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BootedDrafter:
    """A drafter and the evidence that it proposes."""

    drafter: Drafter[Any]
    identity: DraftIdentity | None
    first_draft: FirstDraft
    device: str
    limits: dict[str, str] = field(default_factory=dict)


def boot_drafter(config: DraftConfig, report: Lifecycle[Any]) -> BootedDrafter:
    """Boots what --draft names. Raises what went wrong, in the stage that was entered last."""
    if config.draft == "ngram":
        return boot_ngram(report)
    return boot_model_drafter(config, report)


def boot_ngram(report: Lifecycle[Any]) -> BootedDrafter:
    """Stages config and first_decode. Raises FirstDraftError."""
    report.enter("config")
    drafter = NgramDrafter()
    report.enter("first_decode")
    evidence = first_draft(drafter, vocab_size=NGRAM_FIRST_DRAFT_VOCABULARY)
    expected = evidence.prompt_token_ids[1 : 1 + len(evidence.draft_token_ids)]
    if evidence.draft_token_ids != expected:
        raise FirstDraftError(
            f"the first proposal is {list(evidence.draft_token_ids)}, must be {list(expected)}"
        )
    report.note(evidence.words())
    return BootedDrafter(drafter=drafter, identity=None, first_draft=evidence, device="cpu")


def boot_model_drafter(config: DraftConfig, report: Lifecycle[Any]) -> BootedDrafter:
    """All stages of an engine, then a proposal of its drafter, and of the hybrid around it where
    that is wanted. Raises what the engine raises, and FirstDraftError.
    """
    booted = _boot_head(config, report) if config.has_head else _boot_standalone(config, report)
    vocab_size = booted.identity.vocab_size
    evidence = first_draft(booted.drafter, vocab_size=vocab_size)
    report.note(evidence.words())
    drafter = booted.drafter
    if config.draft == "hybrid":
        drafter = HybridDrafter(NgramDrafter(), booted.drafter)
        report.note(f"with n-grams: {first_draft(drafter, vocab_size=vocab_size).words()}")
    return BootedDrafter(
        drafter=drafter,
        identity=booted.identity,
        first_draft=evidence,
        device=booted.device,
        limits=booted.limits,
    )


# Imported where they are needed, so that the n-gram service never loads torch.


def _boot_head(config: DraftConfig, report: Lifecycle[Any]) -> ModelDrafter:
    from draft_service.drafters.eagle3_boot import boot_eagle3_drafter

    return boot_eagle3_drafter(config, report)


def _boot_standalone(config: DraftConfig, report: Lifecycle[Any]) -> ModelDrafter:
    from draft_service.drafters.standalone_boot import boot_standalone_drafter

    return boot_standalone_drafter(config, report)
