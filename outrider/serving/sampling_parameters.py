"""Sampling parameters as checked values: the edge between protobuf or JSON and the services'
inside. A parameter is in its bounds, or the request is refused by the parameter's name.
"""

import math
from dataclasses import dataclass

from outrider.serving.errors import InvalidArgument
from outrider.v1 import sampling_pb2

# Below it a logit divided by the temperature may be more than a double holds.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1

# OpenAI's bounds of presence and frequency penalty, and of a bias.
MAX_PENALTY = 2.0
MAX_BIAS = 100.0
MAX_BIASES = 1024
# Beyond, every logit is far outside of what a model gives.
MAX_REPETITION_PENALTY = 10.0


_SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How the tokens of one request are chosen. `seed` is None until the gateway has drawn one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    # (token id, what is added to its logit), ascending, each token once.
    logit_bias: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidArgument for the first parameter out of its bounds."""
        is_possible = self.temperature == 0 or self.temperature >= MIN_TEMPERATURE
        _check("temperature", self.temperature, is_possible and self.temperature <= MAX_TEMPERATURE,
               f"0, or between {MIN_TEMPERATURE:g} and {MAX_TEMPERATURE:g}")  # fmt: skip
        _check("top_k", self.top_k, 0 <= self.top_k <= MAX_TOP_K, f"between 0 and {MAX_TOP_K}")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**64, "between 0 and 2**64 - 1")
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _check(
                field,
                value,
                abs(value) <= MAX_PENALTY,
                f"between -{MAX_PENALTY:g} and {MAX_PENALTY:g}",
            )
        _check("repetition_penalty", self.repetition_penalty,
               0 < self.repetition_penalty <= MAX_REPETITION_PENALTY,
               f"above 0 and at most {MAX_REPETITION_PENALTY:g}")  # fmt: skip
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidArgument(
                "logit_bias", f"{len(self.logit_bias)} tokens", f"at most {MAX_BIASES}"
            )
        for token_id, bias in self.logit_bias:
            _check(f"logit_bias[{token_id}]", bias, abs(bias) <= MAX_BIAS,
                   f"between -{MAX_BIAS:g} and {MAX_BIAS:g}")  # fmt: skip

    def to_message(self) -> sampling_pb2.SamplingParameters:
        """Every field set, so that no default has to agree on both ends."""
        return sampling_pb2.SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=[
                sampling_pb2.LogitBias(token_id=token_id, bias=bias)
                for token_id, bias in self.logit_bias
            ],
        )


def _check(field: str, value: float, is_within: bool, bound: str) -> None:
    if not (math.isfinite(value) and is_within):
        raise InvalidArgument(field, value, bound)


def sampling_parameters_from(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
    """Checks a message. Raises InvalidArgument naming field, value and bound."""
    given = {field: getattr(message, field) for field in _SCALARS if message.HasField(field)}
    biases: dict[int, float] = {}
    for one in message.logit_bias:
        if one.token_id in biases:
            raise InvalidArgument("logit_bias", one.token_id, "each token once")
        biases[one.token_id] = one.bias
    return SamplingParameters(**given, logit_bias=tuple(sorted(biases.items())))
