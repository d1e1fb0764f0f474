"""Paged attention of one query row a sequence, whose length the device knows: the steps of a draft
follow each other without the host, and need no plan.

The keys of a sequence are divided among thread blocks, each with a running softmax (Milakov and
Gimelshein, arXiv 1805.02867); a second pass joins them (Flash-Decoding).
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 64
SPLITS = 16
# A tensor-core product needs at least 16 rows.
LEAST_GROUP = 16


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _split_kernel(  # type: ignore[no-untyped-def]
    qkv_pointer,
    keys_pointer,
    values_pointer,
    page_starts_pointer,
    pages_pointer,
    lengths_pointer,
    mixed_pointer,
    totals_pointer,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(lengths_pointer + row)
    pages = pages_pointer + tl.load(page_starts_pointer + row)
    per_split = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    begin = split * per_split
    end = tl.minimum(begin + per_split, length)
    group = tl.arange(0, PADDED)
    dims = tl.arange(0, DIM)
    columns = tl.arange(0, BLOCK)
    is_used = group < GROUP
    heads = GROUP * KV_HEADS
    query = qkv_pointer + (row * (heads + 2 * KV_HEADS) + head * GROUP + group)[:, None] * DIM
    q = tl.load(query + dims[None, :], mask=is_used[:, None], other=0.0)
    best = tl.full([PADDED], -1e30, tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    mixed = tl.zeros([PADDED, DIM], tl.float32)
    for start in range(begin, end, BLOCK):
        places = start + columns
        is_in = places < end
        page = tl.load(pages + places // PAGE, mask=is_in, other=0).to(tl.int64)
        offsets = ((page * PAGE + places % PAGE) * KV_HEADS + head)[:, None] * DIM + dims[None, :]
        k = tl.load(keys_pointer + offsets, mask=is_in[:, None], other=0.0)
        v = tl.load(values_pointer + offsets, mask=is_in[:, None], other=0.0)
        scores = tl.where(is_in[None, :], tl.dot(q, tl.trans(k)) * scale, -1e30)
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - new_best[:, None])
        shrink = tl.exp(best - new_best)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
        best = new_best
    place = ((row * KV_HEADS + head) * SPLITS + split) * GROUP + group
    tl.store(mixed_pointer + place[:, None] * DIM + dims[None, :], mixed, mask=is_used[:, None])
    tl.store(totals_pointer + 2 * place, best, mask=is_used)
    tl.store(totals_pointer + 2 * place + 1, total, mask=is_used)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _join_kernel(  # type: ignore[no-untyped-def]
    mixed_pointer,
    totals_pointer,
    out_pointer,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    query_head = tl.program_id(1)
    head = query_head // GROUP
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, DIM)
    place = ((row * KV_HEADS + head) * SPLITS + splits) * GROUP + query_head % GROUP
    best = tl.load(totals_pointer + 2 * place)
    total = tl.load(totals_pointer + 2 * place + 1)
    share = tl.exp(best - tl.max(best, 0))
    mixed = tl.load(mixed_pointer + place[:, None] * DIM + dims[None, :])
    joined = tl.sum(mixed * share[:, None], 0) / tl.sum(total * share, 0)
    out = out_pointer + (row * GROUP * KV_HEADS + query_head) * DIM + dims
    tl.store(out, joined.to(out_pointer.dtype.element_ty))


class ChainAttention:
    """Of up to so many sequences over one layer's cache."""

    def __init__(
        self, *, max_sequences: int, num_heads: int, num_kv_heads: int, head_dim: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._num_heads = num_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        count = max_sequences * num_heads * SPLITS
        self._mixed = torch.empty(count * head_dim, dtype=torch.float32, device=device)
        self._totals = torch.empty(count * 2, dtype=torch.float32, device=device)

    def attend(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        page_starts: torch.Tensor,
        pages: torch.Tensor,
        lengths: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """output [rows, num_heads * head_dim]: each row over the first `lengths` keys of its
        sequence, at least one, its own among them.

        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], of which the queries are read; keys
        and values: [num_blocks, block_size, num_kv_heads, head_dim]; page_starts [rows + 1], pages
        and lengths [rows]: int32.
        """
        rows, dim = qkv.shape[0], self._head_dim
        group = self._num_heads // self._num_kv_heads
        first: Any = _split_kernel[(rows, self._num_kv_heads, SPLITS)]
        first(
            qkv, keys, values, page_starts, pages, lengths, self._mixed, self._totals, dim**-0.5,
            KV_HEADS=self._num_kv_heads, GROUP=group,
            PADDED=max(LEAST_GROUP, triton.next_power_of_2(group)), DIM=dim, PAGE=keys.shape[1],
            BLOCK=BLOCK, SPLITS=SPLITS, num_warps=4, num_stages=2,
        )  # fmt: skip
        second: Any = _join_kernel[(rows, self._num_heads)]
        second(
            self._mixed, self._totals, output,
            KV_HEADS=self._num_kv_heads, GROUP=group, DIM=dim, SPLITS=SPLITS, num_warps=2,
        )  # fmt: skip
