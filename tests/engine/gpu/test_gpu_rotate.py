"""The rotation kernel against the CPU engine's rotation and head norm, and the cache it fills."""

from collections.abc import Callable

import pytest
import torch

from outrider.engine.layers import HeadNorm
from outrider.engine.rope import rotate_in_place, rotation_table

BLOCK_SIZE = 16
NUM_BLOCKS = 3
LENGTH = 300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 128), (2, 2, 256), (1, 1, 2)]
)
def test_queries_are_rotated_and_keys_and_values_stored(
    kernel_device: torch.device,
    dtype: torch.dtype,
    has_norm: bool,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    from outrider.engine.gpu.rotate_kernel import rotate_and_store

    torch.manual_seed(head_dim)
    rows, num_rotated = 6, num_heads + num_kv_heads
    table = rotation_table(head_dim, 1e5, None, LENGTH)
    qkv = torch.randn(rows, (num_rotated + num_kv_heads) * head_dim).to(dtype)
    positions = torch.tensor([0, 1, 2, 57, LENGTH - 1, 57], dtype=torch.int32)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:rows].int()
    norm_weight = (1 + torch.rand(num_rotated, head_dim)).to(dtype) if has_norm else None

    wanted = qkv.clone().view(rows, -1, head_dim)
    norm: Callable[[torch.Tensor], torch.Tensor] | None = None
    if norm_weight is not None:
        norm = HeadNorm(weight=norm_weight, eps=1e-6)
    rotate_in_place(wanted[:, :num_rotated], table[positions.long()].unsqueeze(1), norm)

    untouched = 7.0
    keys, values = (
        torch.full(
            (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim),
            untouched,
            dtype=dtype,
            device=kernel_device,
        )
        for _ in "kv"
    )
    found = qkv.to(kernel_device)
    rotate_and_store(
        found,
        positions.to(kernel_device),
        torch.view_as_real(table).contiguous().to(kernel_device),
        slots.to(kernel_device),
        keys,
        values,
        num_heads,
        num_kv_heads,
        None if norm_weight is None else norm_weight.to(kernel_device),
        1e-6,
    )
    # Float32 sums and products in another order; in bfloat16 a norm may fall to the other side of
    # each of its two roundings.
    loose = 2 * torch.finfo(dtype).eps if has_norm else torch.finfo(dtype).eps
    heads = found.cpu().view(rows, -1, head_dim)
    stored_keys, stored_values = (
        cache.cpu().view(-1, num_kv_heads, head_dim) for cache in (keys, values)
    )
    at = slots.long()
    for rotated, exact in [
        (heads[:, :num_heads], wanted[:, :num_heads]),
        (stored_keys[at], wanted[:, num_heads:num_rotated]),
    ]:
        # Absolute too: where two products cancel, the rest is as wrong as they are.
        torch.testing.assert_close(rotated, exact, rtol=loose, atol=8 * loose)
        assert (rotated == exact).float().mean() > (0.97 if dtype == torch.bfloat16 else 0.3)
    assert torch.equal(stored_values[at], wanted[:, num_rotated:])
    is_free = torch.ones(NUM_BLOCKS * BLOCK_SIZE, dtype=torch.bool)
    is_free[at] = False
    assert (stored_keys[is_free] == untouched).all()
    assert (stored_values[is_free] == untouched).all()
