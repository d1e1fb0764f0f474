"""Attention of one new query per row over that row's keys in a dense cache, [rows, kv, T, dim].

`matmul_attention` runs anywhere; `triton_attention` reads every key once and only to a row's own
length, which is what decoding thousands of rows on a GPU needs.
"""

import math
from collections.abc import Callable
from typing import Final

import torch

from outrider.engine.model_config import ModelConfig

# Attention mixes values of unit size; bfloat16 keeps 8 bits of them.
TOLERANCE: Final = 0.03

# (queries [B, heads, dim], keys and values [B, kv, T, dim], lengths [B]) -> [B, heads * dim]
DecodeAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor
]  # fmt: skip


class AttentionMismatch(RuntimeError):
    """The decode kernel does not compute attention on this device."""


def matmul_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """Batched products over all T keys, those from a row's length on masked away."""
    batch, heads, dim = q.shape
    kv_heads, span = keys.shape[1:3]
    grouped = q.reshape(batch, kv_heads, heads // kv_heads, dim)
    scores = torch.matmul(grouped, keys.transpose(2, 3)).float() * dim**-0.5
    beyond = torch.arange(span, device=q.device) >= lengths.unsqueeze(1)
    scores.masked_fill_(beyond[:, None, None], -math.inf)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return torch.matmul(weights, values).reshape(batch, heads * dim)


def checked_triton_attention(config: ModelConfig, like: torch.Tensor) -> DecodeAttention:
    """The kernel, once it has agreed with the products on random numbers of the model's shapes.

    Raises ImportError without triton and AttentionMismatch where the two differ.
    """
    from training.decode_kernel import decode_attention

    shape = (2, 8, config.num_kv_heads, 384, config.head_dim)
    cache = torch.randn(shape, device=like.device).to(like.dtype)
    q = torch.randn(8, config.num_heads, config.head_dim, device=like.device).to(like.dtype)
    lengths = torch.tensor([1, 2, 63, 64, 65, 200, 383, 384], device=like.device)
    wanted = matmul_attention(q, cache[0], cache[1], lengths).float()
    found = decode_attention(q, cache[0], cache[1], lengths).float()
    error = float((found - wanted).abs().max())
    if not error < TOLERANCE:
        raise AttentionMismatch(f"decode kernel: differs by {error}: must be below {TOLERANCE}")
    return decode_attention
