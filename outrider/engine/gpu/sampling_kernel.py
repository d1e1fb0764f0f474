"""Draws tokens on the device: the argmax of logit / temperature + noise, with the noise of `noise`.

Every row is divided among thread blocks; each finds its best score, a second pass the best of
these. Scores are float64 and ties go to the lowest id, so a row yields the token that `sampling`
draws from the same logits on the host. Logits wider than the dtype they are stored in do not exist:
bfloat16 ones are read as they are.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
# Blocks of a row; together with the rows they fill the device.
SPLITS = 32
# What a row yields whose largest logit is not finite.
NO_TOKEN = -1

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_POSITION = tl.constexpr(0xD1342543DE82EF95)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _mix(value):  # type: ignore[no-untyped-def]
    value = (value ^ (value >> 30)) * tl.full((), _FIRST, tl.uint64)
    value = (value ^ (value >> 27)) * tl.full((), _SECOND, tl.uint64)
    return value ^ (value >> 31)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gumbel(key, token_ids):  # type: ignore[no-untyped-def]
    golden = tl.full((), _GOLDEN, tl.uint64)
    hashes = _mix(key ^ _mix((token_ids.to(tl.uint64) + 1) * golden))
    uniform = ((hashes >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32).to(tl.float64)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _best_of_split_kernel(  # type: ignore[no-untyped-def]
    logits_pointer,
    seeds_pointer,
    positions_pointer,
    temperatures_pointer,
    token_ids_pointer,
    scores_pointer,
    columns_pointer,
    vocabulary,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures_pointer + row)
    golden = tl.full((), _GOLDEN, tl.uint64)
    seed = tl.load(seeds_pointer + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions_pointer + row).to(tl.uint64)
    key = _mix(_mix(seed + golden) ^ _mix((position + 1) * tl.full((), _POSITION, tl.uint64)))
    best = tl.full((), float("-inf"), tl.float64)
    best_column = vocabulary
    for index in tl.static_range(BLOCKS):
        columns = (split * BLOCKS + index) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < vocabulary
        logits = tl.load(
            logits_pointer + row * vocabulary + columns, mask=inside, other=float("-inf")
        ).to(tl.float32)
        # Not a number wins, so that the second pass sees it.
        logits = tl.where(logits != logits, float("inf"), logits)
        scores = logits.to(tl.float64)
        if temperature > 0:
            ids = columns
            if HAS_IDS:
                ids = tl.load(token_ids_pointer + columns, mask=inside, other=0)
            scores = scores / temperature + _gumbel(key, ids)
            scores = tl.where(inside, scores, float("-inf"))
        top = tl.max(scores, 0)
        column = tl.min(tl.where(inside & (scores == top), columns, vocabulary), 0)
        is_better = top > best
        best_column = tl.where(is_better, column, best_column)
        best = tl.where(is_better, top, best)
    tl.store(scores_pointer + row * SPLITS + split, best)
    tl.store(columns_pointer + row * SPLITS + split, best_column)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _best_of_row_kernel(  # type: ignore[no-untyped-def]
    scores_pointer,
    columns_pointer,
    token_ids_pointer,
    out_pointer,
    vocabulary,
    HAS_IDS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, SPLITS)
    scores = tl.load(scores_pointer + row * SPLITS + splits)
    columns = tl.load(columns_pointer + row * SPLITS + splits)
    top = tl.max(scores, 0)
    column = tl.min(tl.where(scores == top, columns, vocabulary), 0)
    is_finite = (top > float("-inf")) & (top < float("inf"))
    token = column
    if HAS_IDS:
        token = tl.load(token_ids_pointer + tl.minimum(column, vocabulary - 1))
    tl.store(out_pointer + row, tl.where(is_finite, token, -1))


def sampling_workspace(num_rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of so many rows: scores and columns."""
    return (
        torch.empty(num_rows, SPLITS, dtype=torch.float64, device=device),
        torch.empty(num_rows, SPLITS, dtype=torch.int32, device=device),
    )


def sample_rows(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    out: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor],
    token_ids: torch.Tensor | None = None,
) -> None:
    """The token of every row of logits [rows, vocabulary], contiguous; NO_TOKEN where the largest
    is not finite.

    seeds: int64 [rows], modulo 2**64; positions: int32 [rows], of the token drawn; temperatures:
    float64 [rows], 0 = greedy; out: int32 [rows]; token_ids: int32 [vocabulary], ascending, where
    column i is not token i (a draft vocabulary): the noise is that of the token.
    """
    rows, vocabulary = logits.shape
    scores, columns = workspace
    ids = out if token_ids is None else token_ids
    first: Any = _best_of_split_kernel[(rows, SPLITS)]
    first(
        logits, seeds, positions, temperatures, ids, scores, columns, vocabulary,
        HAS_IDS=token_ids is not None, BLOCK=BLOCK, BLOCKS=triton.cdiv(vocabulary, SPLITS * BLOCK),
        SPLITS=SPLITS, num_warps=4,
    )  # fmt: skip
    second: Any = _best_of_row_kernel[(rows,)]
    second(
        scores, columns, ids, out, vocabulary,
        HAS_IDS=token_ids is not None, SPLITS=SPLITS, num_warps=1,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _accept_kernel(  # type: ignore[no-untyped-def]
    drafts_pointer, drawn_pointer, lengths_pointer, out_pointer, NUM_DRAWN: tl.constexpr
):
    sequence = tl.program_id(0)
    length = tl.load(lengths_pointer + sequence)
    accepted = 0
    is_alive = 1
    for index in tl.static_range(NUM_DRAWN):
        here = sequence * NUM_DRAWN + index
        draft = tl.load(drafts_pointer + here)
        drawn = tl.load(drawn_pointer + here)
        is_alive = tl.where((index < length) & (draft == drawn), is_alive, 0)
        accepted += is_alive
    tl.store(out_pointer + sequence, accepted)


def accept(
    draft_token_ids: torch.Tensor,
    drawn: torch.Tensor,
    draft_lengths: torch.Tensor,
    out: torch.Tensor,
    num_drawn: int,
) -> None:
    """How many of each sequence's drafts equal what was drawn in their place, up to the first that
    does not. draft_token_ids and drawn: int32 [sequences * num_drawn]; draft_lengths and out: int32
    [sequences].
    """
    kernel: Any = _accept_kernel[(len(draft_lengths),)]
    kernel(draft_token_ids, drawn, draft_lengths, out, NUM_DRAWN=num_drawn, num_warps=1)
