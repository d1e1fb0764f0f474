"""Divergence of the head's distribution from the target's, row by row, in plain torch.

The equations, and what runs where no kernel does (`row_kernel.py` has the same as one pass).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class RowResults:
    """What each row of draft logits came to, float32 or wider, [rows]."""

    divergence: torch.Tensor  # KL(target || head) over the draft vocabulary
    true_probability: torch.Tensor  # the head's, of the true token; 0 where it is not drafted
    is_correct: torch.Tensor  # 1.0 where the head's most probable token is the true one


# draft_logits [rows, draft_vocab], target_logits [more rows, draft_vocab], first_target_row,
# row_weights [rows], true_ids [rows] (draft vocabulary index, -1 outside): overwrites draft_logits
# with row_weights * (softmax(draft) - softmax(target)), the gradient of sum(weight * divergence).
# Row n belongs to target row first_target_row + n, or the last where there are no more.
RowDivergence = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor, torch.Tensor], RowResults]


def plain_row_divergence(
    draft_logits: torch.Tensor,
    target_logits: torch.Tensor,
    first_target_row: int,
    row_weights: torch.Tensor,
    true_ids: torch.Tensor,
) -> RowResults:
    """See `RowDivergence`; memory for a few wide copies of the logits."""
    dtype = torch.promote_types(draft_logits.dtype, torch.float32)
    count = len(draft_logits)
    last = len(target_logits) - 1
    rows = torch.arange(first_target_row, first_target_row + count, device=draft_logits.device)
    target = torch.log_softmax(target_logits[rows.clamp(max=last)].to(dtype), -1)
    is_drafted = true_ids >= 0
    is_correct = (draft_logits.argmax(-1) == true_ids).to(dtype)
    draft = torch.log_softmax(draft_logits.to(dtype), -1)
    target_probabilities = target.exp()
    divergence = (target_probabilities * (target - draft)).sum(-1)
    probabilities = draft.exp()
    true_probability = probabilities.gather(-1, true_ids.clamp(min=0)[:, None])[:, 0] * is_drafted
    gradient = (probabilities - target_probabilities).mul_(row_weights[:, None])
    draft_logits.copy_(gradient)
    return RowResults(divergence, true_probability, is_correct)
