"""Configuration of the draft service."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from outrider.serving.config import Device, Port, ServiceConfig
from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import parse_faults
from outrider.serving.stages import DRAFT_ACTIVITIES, NGRAM_STAGES

# Of the drafters that the project is made for, those that this version does not have.
ABSENT_DRAFTERS = ("hybrid", "eagle3")


def refuse_absent_drafters(draft: object) -> object:
    """Says of a drafter that is known but not there what it lacks."""
    if draft in ABSENT_DRAFTERS:
        raise ValueError("needs an EAGLE-3 head, which this version cannot load")
    if draft == "none":
        raise ValueError("no draft service is started for it: `outrider up --draft none`")
    return draft


class DraftConfig(ServiceConfig):
    """The draft service: the cheap proposer."""

    port: Port = Field(50052, description="gRPC port; 0 = a free one")
    draft: Annotated[Literal["ngram", "standalone"], BeforeValidator(refuse_absent_drafters)] = (
        Field(
            "ngram",
            description="ngram (matches in prompt and output) or standalone (a small model)",
        )
    )
    draft_model: str = Field(
        "",
        description="standalone: checkpoint with the target's tokenizer: the default's name, "
        "a directory, a GGUF file or a Hub id",
    )
    model: str = Field(
        "",
        description="standalone: the target's model, to compare tokenizers at start-up; "
        "empty = the handshake alone compares them",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the processor has it, else float32"
    )
    device: Device = Field("cpu", description="standalone: where the model runs")
    threads: Annotated[int, Field(ge=0)] = Field(
        0, description="threads of the numeric libraries; 0 = one per core"
    )
    spin_count: Annotated[int, Field(ge=0)] = Field(
        0,
        description="standalone: how often an idle thread looks for work before it sleeps; more "
        "than 0 only on cores of its own",
    )
    kv_cache_mib: Annotated[int, Field(ge=1)] = Field(
        512, description="standalone: size of the KV cache in MiB"
    )
    max_sequences: Annotated[int, Field(ge=1)] = Field(
        1024, description="most sequences held at once, of all targets together"
    )

    def check_combination(self) -> None:
        if self.draft == "standalone" and not self.draft_model:
            raise ConfigurationError(
                "draft-model is '', must name a checkpoint with draft standalone"
            )
        if self.draft == "ngram":
            if self.draft_model:
                raise ConfigurationError(
                    f"draft-model is {self.draft_model!r}, must be empty with draft ngram"
                )
            parse_faults("draft", self.inject_fault, NGRAM_STAGES + DRAFT_ACTIVITIES)
