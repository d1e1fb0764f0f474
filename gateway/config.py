"""Configuration of the gateway."""

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from outrider.serving.api_keys import ApiKeys, load_api_keys
from outrider.serving.config import Port, Seconds, ServiceConfig
from outrider.serving.model_source import DEFAULT_MODEL

# One byte of a link column holds a draft length, and 255 means something else there.
MOST_DRAFT_TOKENS = 32


class GatewayConfig(ServiceConfig):
    """The gateway: REST and gRPC for clients, batches for the target, readiness for operators."""

    port: Port = Field(50050, description="gRPC port; 0 = a free one")
    rest_port: Port = Field(8000, description="REST port; 0 = a free one")
    target_address: str = Field("127.0.0.1:50051", description="host:port of the target service")
    draft_address: str = Field(
        "", description="host:port of the draft service, for its status; empty = none"
    )
    model: str = Field(
        DEFAULT_MODEL,
        description="whose tokenizer: the default's name, a directory, a GGUF file or a Hub id",
    )
    speculation: Literal["auto", "fixed", "off"] = Field(
        "auto",
        description="the draft length with the most tokens per second by decode rows, as learned; "
        "always the longest; or none",
    )
    max_draft_length: Annotated[int, Field(ge=0, le=MOST_DRAFT_TOKENS)] = Field(
        5, description="most draft tokens per sequence and step"
    )
    speculative_disable_batch_threshold: Annotated[int, Field(ge=0, lt=2**32)] = Field(
        0, description="steps with more decode rows run without the draft service; 0 = never"
    )
    batch_window_ms: Annotated[float, Field(ge=0, le=10_000)] = Field(
        0.0, description="milliseconds that a request waits for others to be admitted with it"
    )
    max_waiting_requests: Annotated[int, Field(ge=1)] = Field(
        1024, description="requests that may wait for the target; one more is refused with 429"
    )
    queue_timeout: Annotated[float, Field(ge=0)] = Field(
        0.0,
        description="seconds that a request may wait to be sent to the target before it is "
        "refused with 429; 0 = as long as its deadline allows",
    )
    max_replays: Annotated[int, Field(ge=0, le=100)] = Field(
        3,
        description="how often a request that loses its target is sent to the next one; "
        "0 = it ends with an error at once",
    )
    replay_timeout: Seconds = Field(
        120.0,
        description="seconds that a request that lost its target waits for the next one",
    )
    stall_timeout: Annotated[float, Field(ge=0)] = Field(
        60.0,
        description="seconds without progress after which a sequence at the target is reported as "
        "stalled, longer than a step of prefill takes; 0 = never",
    )
    max_request_bytes: Annotated[int, Field(ge=1024, le=64 * 2**20)] = Field(
        4 * 2**20, description="largest body of a REST request"
    )
    request_body_timeout: Seconds = Field(
        30.0, description="seconds that the body of a REST request may take"
    )
    stream_keep_alive: Annotated[float, Field(ge=0)] = Field(
        10.0,
        description="seconds without an event after which a REST stream that has begun sends a "
        "comment, so that no proxy gives up; 0 = never",
    )
    cors_origins: str = Field(
        "",
        description="web pages of these origins may call the REST API, for example "
        "https://a.example,http://localhost:3000; * = of all; empty = of none",
    )
    api_keys: SecretStr = Field(
        SecretStr(""),
        description="keys of which callers must show one, separated by commas; better as a "
        "variable than as a flag, which other users of the machine can see",
    )
    api_key_file: str = Field(
        "", description="file with a line NAME sha256:HEX for each key, beside --api-keys"
    )
    require_draft: bool = Field(
        False, description="not ready while the draft service is lost; else ready, and degraded"
    )
    canary_acceptance: Literal["require", "warn"] = Field(
        "require", description="whether start-up needs an accepted draft token in the canary"
    )
    peer_timeout: Seconds = Field(
        5.0, description="seconds without an answer after which a service counts as lost"
    )

    def load_api_keys(self) -> ApiKeys:
        """From both places; without any, everybody is let in. Raises ConfigurationError."""
        return load_api_keys(self.api_keys.get_secret_value(), self.api_key_file)

    def check_combination(self) -> None:
        self.load_api_keys()

    @property
    def cors_origin_list(self) -> list[str]:
        """The origins one by one."""
        return [origin.strip() for origin in self.cors_origins.split(",") if origin.strip()]
