"""Sampling parameters as checked values: the edge between protobuf or JSON and the services'
inside.

A parameter is in its bounds, or the request is refused by the parameter's name; one that is not
implemented is refused where it asks for anything but its neutral value.
"""

import math
from dataclasses import dataclass

from outrider.serving.errors import InvalidArgument
from outrider.v1 import sampling_pb2

# Below it a logit divided by the temperature may be more than a double holds.
MIN_TEMPERATURE = 1e-6
MAX_TEMPERATURE = 100.0
MAX_TOP_K = 2**31 - 1

# Refused unless neutral, since nothing here applies them yet.
_NEUTRAL_PENALTIES = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParameters:
    """How the tokens of one request are chosen. `seed` is None until the gateway has drawn one."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

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

    def to_message(self) -> sampling_pb2.SamplingParameters:
        """Every field set, so that no default has to agree on both ends."""
        return sampling_pb2.SamplingParameters(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
        )


def _check(field: str, value: float, is_within: bool, bound: str) -> None:
    if not (math.isfinite(value) and is_within):
        raise InvalidArgument(field, value, bound)


def sampling_parameters_from(message: sampling_pb2.SamplingParameters) -> SamplingParameters:
    """Checks a message. Raises InvalidArgument naming field, value and bound."""
    for field, neutral in _NEUTRAL_PENALTIES.items():
        if message.HasField(field):
            refuse_unless_neutral(field, getattr(message, field), neutral)
    if message.logit_bias:
        raise InvalidArgument("logit_bias", len(message.logit_bias), "empty: not implemented")
    given = {
        field: getattr(message, field)
        for field in ("temperature", "top_k", "top_p", "min_p", "seed")
        if message.HasField(field)
    }
    return SamplingParameters(**given)


def refuse_unless_neutral(field: str, value: float, neutral: float) -> None:
    """Raises InvalidArgument where a parameter that is not implemented asks for something."""
    if value != neutral:
        raise InvalidArgument(field, value, f"{neutral:g}: not implemented")
