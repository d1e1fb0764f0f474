"""Finds how many query rows the CPU's attention kernel must be given to treat every row alike."""

import torch

from outrider.engine.attention.cpu import (
    KEY_SPLIT,
    LARGEST_SHARED_QUERIES,
    SHORT_KEY_LENGTHS,
    CpuAttention,
    flash_attention,
)
from outrider.engine.errors import InvarianceError
from outrider.engine.kv_cache import KvCache
from outrider.engine.model_config import ModelConfig

QUERY_MULTIPLES = (4, 8)
KEY_LENGTHS = (*SHORT_KEY_LENGTHS, KEY_SPLIT, 2 * KEY_SPLIT)
NUM_RUNS = 3
MASKED_KEYS = 37


def build_cpu_attention(config: ModelConfig, cache: KvCache) -> CpuAttention:
    """Attention with the smallest invariant query multiple of this machine.

    Raises InvarianceError naming the shapes if there is none.
    """
    failures = [
        _first_failure(config, cache.blocks.dtype, multiple) for multiple in QUERY_MULTIPLES
    ]
    for multiple, failure in zip(QUERY_MULTIPLES, failures, strict=True):
        if failure is None:
            return CpuAttention(config=config, cache=cache, query_multiple=multiple)
    raise InvarianceError(str(failures[-1]))


def _first_failure(config: ModelConfig, dtype: torch.dtype, multiple: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    heads, head_dim = config.num_kv_heads, config.head_dim

    def random(length: int) -> torch.Tensor:
        shape = (NUM_RUNS, heads, length, head_dim)
        return torch.randn(shape, generator=generator).to(dtype)

    queries = 2 * random(LARGEST_SHARED_QUERIES)
    with torch.inference_mode():
        for key_length in KEY_LENGTHS:
            keys, values = random(key_length), random(key_length)
            mask = torch.zeros(1, 1, LARGEST_SHARED_QUERIES, key_length, dtype=dtype)
            mask[..., key_length - MASKED_KEYS :] = float("-inf")
            whole = flash_attention(queries, keys, values, mask)
            for count in range(multiple, LARGEST_SHARED_QUERIES, multiple):
                for runs in (1, NUM_RUNS):
                    found = flash_attention(
                        queries[:runs, :, :count], keys[:runs], values[:runs], mask[:, :, :count]
                    )
                    if not torch.equal(found, whole[:runs, :, :count]):
                        return (
                            f"attention kernel: {count} query rows of [{runs}, {heads}, {count}, "
                            f"{head_dim}] over {key_length} keys differ from the same rows among "
                            f"{LARGEST_SHARED_QUERIES}, {dtype}"
                        )
    return None
