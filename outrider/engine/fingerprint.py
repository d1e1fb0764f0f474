"""A cheap identity of a checkpoint: its configuration and samples of every tensor."""

import hashlib

import torch

SAMPLES_PER_TENSOR = 1024


class Fingerprint:
    """sha256 over a configuration and tensors, whatever the order they are added in.

    Each tensor gives its name, shape, stored dtype and evenly spaced values. The dtype in which the
    engine computes is no part of it.
    """

    def __init__(self, config: object) -> None:
        self._config = repr(config)
        self._digests: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.flatten()
        stride = max(1, flat.numel() // SAMPLES_PER_TENSOR)
        digest = hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(flat[::stride].to(torch.float64).numpy().tobytes())
        self._digests[name] = digest.hexdigest()

    def hexdigest(self) -> str:
        lines = [self._config, *(f"{name} {self._digests[name]}" for name in sorted(self._digests))]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()
