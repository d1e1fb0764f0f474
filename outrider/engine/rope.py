"""Rotary position embedding: inverse frequencies and the table of rotations.

Su et al., RoFormer (arXiv 2104.09864). Pairs are adjacent elements (2i, 2i + 1) of a head, so a
rotation is one complex product; `weights.py` brings every checkpoint's rows into that order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.elementwise import row_slices


class RopeScaling(Protocol):
    """Stretches inverse frequencies so that a model reaches beyond its trained length."""

    def apply(self, inverse_frequencies: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions are divided by `factor` (Chen et al., arXiv 2306.15595)."""

    factor: float

    def apply(self, inverse_frequencies: torch.Tensor) -> torch.Tensor:
        return inverse_frequencies / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths are divided by `factor`, short ones kept, the band between
    blended linearly in (original length / wavelength)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def apply(self, inverse_frequencies: torch.Tensor) -> torch.Tensor:
        wavelengths = 2 * math.pi / inverse_frequencies
        turns = self.original_max_position_embeddings / wavelengths
        span = self.high_freq_factor - self.low_freq_factor
        keep = ((turns - self.low_freq_factor) / span).clamp(0.0, 1.0)
        return inverse_frequencies * (keep + (1.0 - keep) / self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """One divisor per frequency, as GGUF files carry them in the tensor `rope_freqs.weight`."""

    factors: tuple[float, ...]

    def apply(self, inverse_frequencies: torch.Tensor) -> torch.Tensor:
        return inverse_frequencies / torch.tensor(self.factors, dtype=inverse_frequencies.dtype)


def rotation_table(
    head_dim: int, theta: float, scaling: RopeScaling | None, length: int
) -> torch.Tensor:
    """exp(i * position * frequency) as complex64 [length, head_dim / 2], computed in float64."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequencies = theta**-exponents
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)


def rotate_in_place(
    heads: torch.Tensor,
    rotations: torch.Tensor,
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Norm (where there is one) and rotate heads [rows, heads, head_dim] by the rotations of their
    rows, complex64 [rows, 1, head_dim / 2].
    """
    num_rows, num_heads, head_dim = heads.shape
    for rows in row_slices(num_rows, num_heads * head_dim // 2):
        part = heads[rows]
        states = part if norm is None else norm(part)
        pairs = states.float().view(*states.shape[:2], head_dim // 2, 2)
        rotated = torch.view_as_complex(pairs) * rotations[rows]
        part.copy_(torch.view_as_real(rotated).view(states.shape))
