"""A cheap identity of a checkpoint: its configuration and samples of every tensor."""

import hashlib

import torch

from outrider.engine.model_config import ModelConfig

SAMPLES_PER_TENSOR = 1024


class Fingerprint:
    """sha256 over a configuration, then over tensors in the order they are added.

    Each tensor gives its name, shape, stored dtype and evenly spaced values. The dtype in which the
    engine computes is no part of it.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._hash = hashlib.sha256(repr(config).encode())

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._hash.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.flatten()
        stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        self._hash.update(flat[::stride].to(torch.float64).numpy().tobytes())

    def hexdigest(self) -> str:
        return self._hash.hexdigest()
