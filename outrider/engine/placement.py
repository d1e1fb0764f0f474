"""Where loaded weights go, and in which form a device multiplies by them."""

from dataclasses import dataclass
from typing import Protocol

import torch

from outrider.engine.layers import pack


class Placement(Protocol):
    """Takes each tensor of a checkpoint as it has been read and checked, on the host."""

    def table(self, tensor: torch.Tensor) -> torch.Tensor:
        """For what is read row by row or element by element: embeddings, norms, biases."""
        ...

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        """For the weight of a product, [out, in]."""
        ...


@dataclass(frozen=True, slots=True)
class CpuPlacement:
    """Products on the CPU take their weight in a layout of their own."""

    def table(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return pack(weight)


@dataclass(frozen=True, slots=True)
class DevicePlacement:
    """On a GPU every tensor is as it was; a tied head is the embedding itself."""

    device: torch.device

    def table(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def matrix(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(self.device)


ON_CPU = CpuPlacement()
