"""Configuration of the target service."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from outrider.serving.config import Device, Port, ServiceConfig
from outrider.serving.model_source import DEFAULT_MODEL
from target_service.feature_layers import parse_feature_layers

# Beyond it no draft is right often enough to be worth its rows.
MOST_DRAFT_TOKENS = 32


def _check_cache_size(size: str) -> str:
    if size != "auto" and not (size.isascii() and size.isdecimal() and int(size) > 0):
        raise ValueError("must be auto or a number of at least 1")
    return size


CacheSize = Annotated[str, AfterValidator(_check_cache_size)]


class TargetConfig(ServiceConfig):
    """The target service: the model whose output counts."""

    port: Port = Field(50051, description="gRPC port; 0 = a free one")
    model: str = Field(
        DEFAULT_MODEL, description="the default's name, a directory, a GGUF file or a Hub id"
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="auto: bfloat16 where the processor has it, else float32"
    )
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    threads: Annotated[int, Field(ge=0)] = Field(
        0, description="threads of the engine; 0 = one per core"
    )
    spin_count: Annotated[int, Field(ge=0)] = Field(
        3000,
        description="how often an idle thread looks for work before it sleeps; 0 where a model "
        "drafter computes on the same cores",
    )
    draft_address: str = Field("", description="host:port of the draft service; empty = none")
    feature_layers: str = Field(
        "",
        description="layers whose input a drafter may ask features of, for example 2,15,27; "
        "empty = 2, L/2 and L-3 of L",
    )
    feature_transport: Literal["auto", "inline", "shared_memory"] = Field(
        "auto",
        description="how features travel; auto: shared memory on one host, else inline; "
        "shared_memory: a link without it is refused",
    )
    max_draft_length: Annotated[int, Field(ge=0, le=MOST_DRAFT_TOKENS)] = Field(
        5, description="most draft tokens asked for per sequence and step"
    )
    max_running_sequences: Annotated[int, Field(ge=1, le=4096)] = Field(
        64, description="most sequences decoded at once"
    )
    max_waiting_sequences: Annotated[int, Field(ge=1)] = Field(
        1024, description="most sequences that wait for a place"
    )
    kv_cache_mib: CacheSize = Field(
        "auto",
        description="size of the KV cache in MiB; auto: 1024 on a CPU, and on a GPU what weights, "
        "graphs and workspaces leave of it, less a tenth of its memory and at least 3 GiB, up to "
        "what the running sequences can fill",
    )

    @property
    def kv_cache_bytes(self) -> int | None:
        """None = auto."""
        return None if self.kv_cache_mib == "auto" else int(self.kv_cache_mib) * 2**20

    prefix_caching: bool = Field(
        True,
        description="keep the KV blocks of ended sequences as long as there is room, for those "
        "that begin with the same tokens",
    )
    block_size: Annotated[int, Field(ge=1)] = Field(32, description="tokens in a KV cache block")
    max_sequence_length: Annotated[int, Field(ge=0)] = Field(
        0, description="most tokens of prompt and output together; 0 = the model's"
    )
    max_step_rows: Annotated[int, Field(ge=16)] = Field(
        512, description="most tokens in one forward"
    )
    max_prefill_rows: Annotated[int, Field(ge=8)] = Field(
        256, description="most prompt tokens in a forward that also decodes"
    )

    def check_combination(self) -> None:
        parse_feature_layers(self.feature_layers)
