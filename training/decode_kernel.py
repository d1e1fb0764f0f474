"""The decode attention kernel: one program per row and key head, with a running softmax
(Milakov and Gimelshein, arXiv 1805.02867; blocked as in FlashAttention, arXiv 2205.14135)."""

import torch
import triton
import triton.language as tl

BLOCK = 64
# A tensor-core product needs at least 16 rows.
MIN_GROUP = 16


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _attend(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, lengths_ptr, out_ptr, row_stride, head_stride, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ACCURATE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths_ptr + row).to(tl.int32)
    group = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    columns = tl.arange(0, BLOCK)
    q_offsets = ((row * KV_HEADS + head) * GROUP + group)[:, None] * DIM + dims[None, :]
    used = (group < GROUP)[:, None]
    q = tl.load(q_ptr + q_offsets, mask=used, other=0.0)
    base = row * row_stride + head * head_stride
    best = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, DIM], tl.float32)
    for start in range(0, length, BLOCK):
        positions = start + columns
        valid = positions < length
        offsets = base + positions[:, None] * DIM + dims[None, :]
        k = tl.load(k_ptr + offsets, mask=valid[:, None], other=0.0)
        if ACCURATE:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(valid[None, :], scores, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + offsets, mask=valid[:, None], other=0.0)
        if ACCURATE:
            part = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        else:
            part = tl.dot(weights.to(v.dtype), v)
        mixed = mixed * shrink[:, None] + part
        best = new_best
    mixed = mixed / total[:, None]
    tl.store(out_ptr + q_offsets, mixed.to(out_ptr.dtype.element_ty), mask=used)


def decode_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    """[B, heads, dim] queries over [B, kv, T, dim] keys, the first lengths[b] >= 1 of each row.

    `dim` must be a power of two from 16 on. Returns [B, heads * dim].
    """
    batch, heads, dim = q.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    q = q.contiguous()
    out = torch.empty(batch, heads * dim, dtype=q.dtype, device=q.device)
    assert keys.stride() == values.stride() and keys.stride()[2:] == (dim, 1)
    _attend[(batch, kv_heads)](
        q, keys, values, lengths, out, keys.stride(0), keys.stride(1), dim**-0.5,
        KV_HEADS=kv_heads, GROUP=group, PADDED=max(MIN_GROUP, triton.next_power_of_2(group)),
        DIM=dim, BLOCK=BLOCK, ACCURATE=q.dtype == torch.float32, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _choose(  # type: ignore[no-untyped-def]
    logits_ptr, temperatures_ptr, margins_ptr, step_ptr, out_ptr, vocab_size, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    base = row.to(tl.int64) * vocab_size
    columns = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], -1e30, tl.float32)
    for start in range(0, vocab_size, BLOCK):
        valid = start + columns < vocab_size
        x = tl.load(logits_ptr + base + start + columns, mask=valid, other=-1e30)
        highest = tl.maximum(highest, x.to(tl.float32))
    floor = tl.max(highest, 0) + tl.load(margins_ptr + row)
    temperature = tl.load(temperatures_ptr + row)
    seed = tl.load(step_ptr)
    best = tl.full([BLOCK], -1e30, tl.float32)
    index = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        places = start + columns
        valid = places < vocab_size
        x = tl.load(logits_ptr + base + places, mask=valid, other=-1e30).to(tl.float32)
        scores = x
        if temperature > 0:
            uniform = tl.maximum(tl.rand(seed, row * vocab_size + places), 1e-10)
            scores = x - temperature * tl.log(-tl.log(uniform))
        scores = tl.where(valid & (x >= floor), scores, -1e30)
        better = scores > best
        best = tl.where(better, scores, best)
        index = tl.where(better, places, index)
    chosen = tl.min(tl.where(best == tl.max(best, 0), index, vocab_size - 1), 0)
    tl.store(out_ptr + row, chosen.to(tl.int64))


def fused_choice(
    logits: torch.Tensor, temperatures: torch.Tensor, margins: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """token_choice's contract, with counted noise: the step number [1] seeds it."""
    rows, vocab_size = logits.shape
    assert logits.is_contiguous() and rows * vocab_size < 2**31
    out = torch.empty(rows, dtype=torch.long, device=logits.device)
    _choose[(rows,)](logits, temperatures, margins, step, out, vocab_size, BLOCK=2048, num_warps=8)
    return out
