"""The row divergence as one Triton kernel: each row of logits is read once and written once."""

import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from training.row_divergence import RowResults

# One program holds a whole row of both logits; beyond this they would not fit its registers.
MAX_DRAFT_VOCABULARY = 32_768
# What compiling or launching it can raise on a device that it does not suit.
KERNEL_ERRORS = (TritonError, RuntimeError)


# One compiled form serves every step and batch: no value of these is worth another.
@triton.jit(do_not_specialize=["first_target_row", "last_target_row"])  # type: ignore[untyped-decorator, unused-ignore]
def _row_kernel(  # type: ignore[no-untyped-def]
    draft_pointer,
    target_pointer,
    weight_pointer,
    true_pointer,
    divergence_pointer,
    probability_pointer,
    correct_pointer,
    vocabulary,
    first_target_row,
    last_target_row,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target_row = tl.minimum(row + first_target_row, last_target_row)
    columns = tl.arange(0, BLOCK)
    inside = columns < vocabulary
    draft_row = draft_pointer + row * vocabulary
    draft = tl.load(draft_row + columns, mask=inside, other=float("-inf")).to(tl.float32)
    target = tl.load(
        target_pointer + target_row * vocabulary + columns, mask=inside, other=float("-inf")
    ).to(tl.float32)
    true_id = tl.load(true_pointer + row)
    weight = tl.load(weight_pointer + row)
    draft_max = tl.max(draft, 0)
    target_max = tl.max(target, 0)
    draft_exp = tl.exp(draft - draft_max)
    target_exp = tl.exp(target - target_max)
    draft_sum = tl.sum(draft_exp, 0)
    target_sum = tl.sum(target_exp, 0)
    # log target probability - log draft probability; the padding's inf - inf is masked away.
    offset = draft_max + tl.log(draft_sum) - target_max - tl.log(target_sum)
    target_probability = target_exp / target_sum
    draft_probability = draft_exp / draft_sum
    terms = tl.where(inside, target_probability * (target - draft + offset), 0.0)
    is_true = columns == true_id
    tl.store(divergence_pointer + row, tl.sum(terms, 0))
    tl.store(probability_pointer + row, tl.sum(tl.where(is_true, draft_probability, 0.0), 0))
    # The first of equal logits counts as the head's choice, as argmax has it.
    choice = tl.min(tl.where(draft == draft_max, columns, BLOCK), 0)
    tl.store(correct_pointer + row, tl.where(choice == true_id, 1.0, 0.0))
    gradient = weight * (draft_probability - target_probability)
    tl.store(draft_row + columns, gradient.to(draft_pointer.dtype.element_ty), mask=inside)


def fused_row_divergence(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    first_target_row: int,
    row_weights: torch.Tensor,
    true_ids: torch.Tensor,
) -> RowResults:
    """See `RowDivergence`; on an NVIDIA GPU, up to MAX_DRAFT_VOCABULARY columns."""
    count, vocabulary = draft_logits.shape
    assert draft_logits.is_contiguous() and target_logits.is_contiguous()
    assert vocabulary == target_logits.shape[1] <= MAX_DRAFT_VOCABULARY
    # Three tensors, each aligned: the compiled form depends on the alignment of its pointers.
    results = [
        torch.empty(count, dtype=torch.float32, device=draft_logits.device) for _ in range(3)
    ]
    block = triton.next_power_of_2(vocabulary)
    _row_kernel[(count,)](
        draft_logits,
        target_logits,
        row_weights,
        true_ids,
        results[0],
        results[1],
        results[2],
        vocabulary,
        first_target_row,
        len(target_logits) - 1,
        BLOCK=block,
        num_warps=min(32, max(4, block // 1024)),
    )
    return RowResults(results[0], results[1], results[2])
