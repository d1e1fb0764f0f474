"""The paged KV cache on a GPU, in the layout that its attention kernels read."""

from dataclasses import dataclass

import torch

from outrider.engine.errors import ConfigError
from outrider.engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuKvCache:
    """Keys and values of every token; block 0 takes what padding rows write."""

    keys: torch.Tensor  # [num_layers, num_blocks, block_size, num_kv_heads, head_dim]
    values: torch.Tensor

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype


def block_bytes(config: ModelConfig, *, block_size: int, dtype: torch.dtype) -> int:
    """Of one block in all layers, keys and values."""
    return config.num_layers * block_size * 2 * config.kv_size * dtype.itemsize


def allocate_gpu_kv_cache(
    config: ModelConfig,
    *,
    kv_cache_bytes: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> GpuKvCache:
    """A zeroed cache of at most `kv_cache_bytes`; ConfigError if that is below two blocks."""
    one_block = block_bytes(config, block_size=block_size, dtype=dtype)
    num_blocks = kv_cache_bytes // one_block
    if num_blocks < 2:
        raise ConfigError(
            f"kv_cache_bytes is {kv_cache_bytes}: must be at least {2 * one_block}, two blocks"
        )
    shape = (config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim)
    # Zeros: a padding row attends to what nobody has written, and NaN would spread.
    return GpuKvCache(
        keys=torch.zeros(shape, dtype=dtype, device=device),
        values=torch.zeros(shape, dtype=dtype, device=device),
    )
