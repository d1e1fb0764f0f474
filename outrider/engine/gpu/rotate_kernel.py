"""Rotary position embedding (arXiv 2104.09864) of queries and keys, and the keys' and values' way
into the paged cache, in one pass over the fused projection.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _rotate_kernel(  # type: ignore[no-untyped-def]
    qkv_pointer,
    positions_pointer,
    rotations_pointer,
    slots_pointer,
    keys_pointer,
    values_pointer,
    norm_pointer,
    eps,
    num_heads,
    num_kv_heads,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pairs = tl.arange(0, HALF)
    dim: tl.constexpr = 2 * HALF
    all_heads = num_heads + 2 * num_kv_heads
    head_pointer = qkv_pointer + (row * all_heads + head) * dim
    slot = tl.load(slots_pointer + row).to(tl.int64)
    first = tl.load(head_pointer + 2 * pairs)
    second = tl.load(head_pointer + 2 * pairs + 1)
    if head < num_heads + num_kv_heads:
        left, right = first.to(tl.float32), second.to(tl.float32)
        if HAS_NORM:
            squares = tl.sum(left * left + right * right, 0)
            scale = 1.0 / tl.sqrt_rn(squares / dim + eps)
            # Rounded before the weight and after it, as the CPU's two operations are.
            left = (left * scale).to(first.dtype).to(tl.float32)
            right = (right * scale).to(first.dtype).to(tl.float32)
            weight = norm_pointer + head * dim
            left = (left * tl.load(weight + 2 * pairs).to(tl.float32)).to(first.dtype)
            right = (right * tl.load(weight + 2 * pairs + 1).to(tl.float32)).to(first.dtype)
            left, right = left.to(tl.float32), right.to(tl.float32)
        position = tl.load(positions_pointer + row).to(tl.int64)
        rotation = rotations_pointer + (position * HALF + pairs) * 2
        cosine = tl.load(rotation)
        sine = tl.load(rotation + 1)
        first = (left * cosine - right * sine).to(first.dtype)
        second = (left * sine + right * cosine).to(second.dtype)
    if head < num_heads:
        tl.store(head_pointer + 2 * pairs, first)
        tl.store(head_pointer + 2 * pairs + 1, second)
    elif head < num_heads + num_kv_heads:
        place = keys_pointer + (slot * num_kv_heads + head - num_heads) * dim
        tl.store(place + 2 * pairs, first)
        tl.store(place + 2 * pairs + 1, second)
    else:
        place = values_pointer + (slot * num_kv_heads + head - num_heads - num_kv_heads) * dim
        tl.store(place + 2 * pairs, first)
        tl.store(place + 2 * pairs + 1, second)


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> None:
    """Norms (where there is a weight) and rotates the queries of qkv in place, and writes keys,
    normed and rotated, and values to the cache.

    qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], pairs being adjacent elements;
    positions and slots: int32 [rows]; rotations: float32 [length, head_dim / 2, 2], cosine and
    sine; keys and values: [num_blocks, block_size, num_kv_heads, head_dim], where a slot is block *
    block_size + offset; norm_weight: [num_heads + num_kv_heads, head_dim]. All contiguous.
    """
    rows = qkv.shape[0]
    kernel: Any = _rotate_kernel[(rows, num_heads + 2 * num_kv_heads)]
    kernel(
        qkv, positions, rotations, slots, keys, values,
        qkv if norm_weight is None else norm_weight, eps, num_heads, num_kv_heads,
        HAS_NORM=norm_weight is not None, HALF=keys.shape[-1] // 2, num_warps=1,
    )  # fmt: skip
