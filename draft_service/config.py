"""Configuration of the draft service."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from outrider.serving.config import Device, Port, ServiceConfig
from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import parse_faults
from outrider.serving.head_source import is_head, shipped_head
from outrider.serving.model_source import DEFAULT_MODEL
from outrider.serving.stages import DRAFT_ACTIVITIES, NGRAM_STAGES


def refuse_none(draft: object) -> object:
    """Says of the drafter that is none that it needs no service."""
    if draft == "none":
        raise ValueError("no draft service is started for it: `outrider up --draft none`")
    return draft


class DraftConfig(ServiceConfig):
    """The draft service: the cheap proposer."""

    port: Port = Field(50052, description="gRPC port; 0 = a free one")
    draft: Annotated[
        Literal["auto", "hybrid", "eagle3", "ngram", "standalone"], BeforeValidator(refuse_none)
    ] = Field(
        "auto",
        description="hybrid (n-gram where it matches, else the head or small model), eagle3 (a "
        "head), ngram (matches in prompt and output) or standalone (a small model); auto = hybrid "
        "where a head is at hand, else ngram",
    )
    draft_model: str = Field(
        "",
        description="eagle3, hybrid: directory of the head, empty = the one that ships for the "
        "model; standalone, hybrid: checkpoint with the target's tokenizer: the default's name, "
        "a directory, a GGUF file or a Hub id",
    )
    model: str = Field(
        "",
        description="the target's model: a head takes its embedding from it (empty = "
        f"{DEFAULT_MODEL} for the head that ships for it); standalone compares tokenizers with "
        "it, empty = the handshake alone does",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the processor has it, else float32"
    )
    device: Device = Field("cpu", description="where a model drafter computes")
    threads: Annotated[int, Field(ge=0)] = Field(
        0, description="threads of the numeric libraries; 0 = one per core"
    )
    spin_count: Annotated[int, Field(ge=0)] = Field(
        0,
        description="model drafters: how often an idle thread looks for work before it sleeps; "
        "more than 0 only on cores of its own",
    )
    kv_cache_mib: Annotated[int, Field(ge=1)] = Field(
        512, description="model drafters: size of the KV cache in MiB"
    )
    max_draft_length: Annotated[int, Field(ge=0, le=32)] = Field(
        5, description="on a GPU: longest draft that graphs are captured for"
    )
    draft_window: Annotated[int, Field(ge=0)] = Field(
        0, description="eagle3: positions before a sequence's end that the head sees; 0 = all"
    )
    draft_min_probability: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="eagle3: a draft ends where the head's own probability of all its tokens "
        "falls below; 0 = never",
    )
    feature_transport: Literal["auto", "inline", "shared_memory"] = Field(
        "auto",
        description="eagle3: how the target's features come; auto: shared memory on one host, "
        "else inline; shared_memory: a target without it is refused",
    )
    max_sequences: Annotated[int, Field(ge=1)] = Field(
        1024, description="most sequences held at once, of all targets together"
    )

    @model_validator(mode="before")
    @classmethod
    def _choose(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Settles what `auto` and a head that is not named come to, so that the configuration
        that is shown is the one in effect.
        """
        draft, model = values.get("draft", "auto"), values.get("model", "")
        draft_model = values.get("draft_model", "")
        if draft in ("auto", "hybrid", "eagle3") and not draft_model:
            head = shipped_head(model)
            if head is not None:
                values = {**values, "draft_model": str(head), "model": model or DEFAULT_MODEL}
                draft_model = values["draft_model"]
        if draft == "auto":
            values = {**values, "draft": "hybrid" if draft_model else "ngram"}
        return values

    @property
    def computes_model(self) -> bool:
        """It needs processors, or a GPU, as a target does."""
        return self.draft != "ngram"

    @property
    def has_head(self) -> bool:
        """An EAGLE-3 head drafts, alone or beside n-grams."""
        return self.draft == "eagle3" or (
            self.draft == "hybrid" and is_head(Path(self.draft_model).expanduser())
        )

    def check_combination(self) -> None:
        if self.draft in ("hybrid", "eagle3") and not self.draft_model:
            raise ConfigurationError(
                f"draft-model is '', must name an EAGLE-3 head with draft {self.draft}: none "
                f"ships for model {self.model or DEFAULT_MODEL!r}"
            )
        if self.draft == "eagle3" and not is_head(Path(self.draft_model).expanduser()):
            raise ConfigurationError(
                f"draft-model is {self.draft_model!r}, must be the directory of an EAGLE-3 head "
                "with draft eagle3: its config.json names none"
            )
        if self.draft == "standalone":
            if not self.draft_model:
                raise ConfigurationError(
                    "draft-model is '', must name a checkpoint with draft standalone"
                )
            if is_head(Path(self.draft_model).expanduser()):
                raise ConfigurationError(
                    f"draft-model is {self.draft_model!r}, an EAGLE-3 head: draft must be eagle3 "
                    "or hybrid"
                )
        if self.draft == "ngram":
            if self.draft_model:
                raise ConfigurationError(
                    f"draft-model is {self.draft_model!r}, must be empty with draft ngram"
                )
            parse_faults("draft", self.inject_fault, NGRAM_STAGES + DRAFT_ACTIVITIES)
        if self.device != "cpu" and self.draft_min_probability:
            raise ConfigurationError(
                f"draft-min-probability is {self.draft_min_probability:g}, must be 0 with device "
                f"{self.device!r}: a draft is one graph there"
            )
        if not self.has_head:
            for name, is_given in (
                ("draft-window", bool(self.draft_window)),
                ("draft-min-probability", bool(self.draft_min_probability)),
            ):
                if is_given:
                    raise ConfigurationError(f"{name} is given, must be 0 without an EAGLE-3 head")
