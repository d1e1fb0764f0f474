"""Attention of one drafting step of every chain at once, with its gradient.

Chain i at step j looks at the true rows 0..i (causal over `key` and `value`) and at its own rows of
steps 1..j (one key each: `own_keys`, `own_values`), under one softmax.

Two forms compute the same: `plain_attention` writes the score matrix out; `FlashAttention` lets a
flash kernel do the causal part and merges the few own keys by its log-sum-exp. The kernel's own
backward, given the merged output and log-sum-exp, is exactly the causal part's share of the whole
gradient: it forms exp(score - lse) and dout.out from them (as in ring attention, arXiv 2310.01889).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

# query [batch, heads, length, head_dim]; key, value alike (heads repeated to those of the query);
# own keys and values [batch, kv_heads, length, head_dim], one pair per earlier or present step.
ChainAttention = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]],
    torch.Tensor,
]


def plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """[batch, heads, length, head_dim]; memory for length * length scores per head."""
    length, head_dim = query.shape[2:]
    scale = 1 / math.sqrt(head_dim)
    groups = query.shape[1] // (own_keys[0].shape[1] if own_keys else query.shape[1])
    future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ key.transpose(2, 3)).mul(scale).masked_fill(future, -math.inf)
    own = [
        (query * own_key.repeat_interleave(groups, 1)).sum(-1, keepdim=True) * scale
        for own_key in own_keys
    ]
    weights = torch.cat([scores, *own], -1)
    dtype = torch.promote_types(weights.dtype, torch.float32)
    weights = torch.softmax(weights.to(dtype), -1).to(query.dtype)
    out = weights[..., :length] @ value
    for step, own_value in enumerate(own_values):
        share = weights[..., length + step, None]
        out = out + share * own_value.repeat_interleave(groups, 1)
    return out


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    own_keys: Sequence[torch.Tensor],
    own_values: Sequence[torch.Tensor],
) -> torch.Tensor:
    """As `plain_attention`, without a score matrix. On CUDA the dtype must have 16 bits."""
    out: torch.Tensor = FlashAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, *own_keys, *own_values
    )
    return out


class FlashAttention(torch.autograd.Function):
    """The flash form of a chain's attention; see the module's text."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *own: torch.Tensor,
    ) -> torch.Tensor:
        steps = len(own) // 2
        causal, causal_lse, kernel_state = _flash_forward(query, key, value)
        if steps == 0:
            out, lse, shares = causal, causal_lse, []
        else:
            scale = 1 / math.sqrt(query.shape[3])
            grouped = _grouped(query, own[0].shape[1])
            scores = [
                (grouped * own_key[:, :, None]).sum(-1, dtype=causal_lse.dtype).flatten(1, 2)
                * scale
                for own_key in own[:steps]
            ]
            lse = torch.logsumexp(torch.stack([causal_lse, *scores]), 0)
            merged = _grouped(causal * torch.exp(causal_lse - lse)[..., None], own[0].shape[1])
            shares = [torch.exp(score - lse) for score in scores]
            for share, own_value in zip(shares, own[steps:], strict=True):
                weight = _grouped(share[..., None], own_value.shape[1])
                merged = torch.addcmul(merged, weight, own_value[:, :, None].to(merged.dtype))
            out = merged.flatten(1, 2).to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse, *own, *shares)
        ctx.kernel_state = kernel_state
        ctx.steps = steps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse, *rest = ctx.saved_tensors
        steps = ctx.steps
        own_keys, own_values, shares = rest[:steps], rest[steps : 2 * steps], rest[2 * steps :]
        grad_out = grads[0]
        grad_query, grad_key, grad_value = _flash_backward(
            grad_out, query, key, value, out, lse, ctx.kernel_state
        )
        if steps == 0:
            return grad_query, grad_key, grad_value
        scale = 1 / math.sqrt(query.shape[3])
        kv_heads = own_keys[0].shape[1]
        grouped_query, grouped_grad = _grouped(query, kv_heads), _grouped(grad_out, kv_heads)
        delta = _grouped((grad_out * out).sum(-1, keepdim=True, dtype=lse.dtype), kv_heads)
        grad_query_own = _grouped(grad_query, kv_heads)
        grad_keys, grad_values = [], []
        for own_key, own_value, share in zip(own_keys, own_values, shares, strict=True):
            weight = _grouped(share[..., None], kv_heads)
            grad_share = (grouped_grad * own_value[:, :, None]).sum(
                -1, keepdim=True, dtype=lse.dtype
            )
            grad_score = (weight * (grad_share - delta) * scale).to(query.dtype)
            grad_query_own = torch.addcmul(grad_query_own, grad_score, own_key[:, :, None])
            grad_keys.append((grad_score * grouped_query).sum(2))
            grad_values.append((weight.to(query.dtype) * grouped_grad).sum(2))
        grad_query = grad_query_own.flatten(1, 2)
        return grad_query, grad_key, grad_value, *grad_keys, *grad_values


def _grouped(tensor: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[batch, heads, length, n] as [batch, kv_heads, heads / kv_heads, length, n]."""
    batch, heads, length, size = tensor.shape
    return tensor.reshape(batch, kv_heads, heads // kv_heads, length, size)


def _flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Any, ...]]:
    if query.device.type == "cuda":
        out, lse, *state = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, True
        )
        return out, lse, tuple(state[:6])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, True
    )
    return out, lse, ()


def _flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    state: tuple[Any, ...],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if query.device.type == "cuda":
        first_q, first_k, max_q, max_k, seed, offset = state
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad_out, query, key, value, out, lse.contiguous(),
            first_q, first_k, max_q, max_k, 0.0, True, seed, offset,
        )  # fmt: skip
    else:
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, lse, 0.0, True
        )
    return grads[0], grads[1], grads[2]
