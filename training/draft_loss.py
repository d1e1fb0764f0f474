"""Weighted divergence of one drafting step: output head, loss and gradient together.

The logits of one step are as large as everything else, so they are never kept: the forward pass
overwrites them with their gradient and carries that back to the rows and to the output head.
"""

from dataclasses import dataclass
from typing import Any

import torch

from training.row_divergence import RowDivergence, RowResults


@dataclass(frozen=True, slots=True)
class StepTargets:
    """What one step's rows are measured against."""

    target_logits: torch.Tensor  # [chains, draft_vocab]: row n is chain n's at step 0
    first_target_row: int  # the step: chain n then stands where chain n + step began
    row_weights: torch.Tensor  # [chains]
    true_ids: torch.Tensor  # [chains] index in the draft vocabulary, -1 outside


def step_loss(
    rows: torch.Tensor,
    lm_head: torch.Tensor,
    targets: StepTargets,
    row_divergence: RowDivergence,
    max_rows: int,
) -> tuple[torch.Tensor, RowResults]:
    """sum(weight * divergence) of rows [chains, hidden_size], and what each row came to.

    `max_rows` logits rows are in memory at a time.
    """
    loss, divergence, probability, correct = _StepLoss.apply(  # type: ignore[no-untyped-call]
        rows, lm_head, targets, row_divergence, max_rows
    )
    return loss, RowResults(divergence, probability, correct)


class _StepLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        lm_head: torch.Tensor,
        targets: StepTargets,
        row_divergence: RowDivergence,
        max_rows: int,
    ) -> tuple[torch.Tensor, ...]:
        weight = lm_head.to(rows.dtype)
        needs_gradient = any(ctx.needs_input_grad[:2])
        if needs_gradient:
            grad_rows = torch.empty_like(rows)
            grad_weight = torch.zeros_like(lm_head)
        parts: list[RowResults] = []
        for first in range(0, len(rows), max_rows):
            chunk = slice(first, first + max_rows)
            logits = rows[chunk] @ weight.T
            parts.append(
                row_divergence(
                    logits,
                    targets.target_logits,
                    targets.first_target_row + first,
                    targets.row_weights[chunk],
                    targets.true_ids[chunk],
                )
            )
            if needs_gradient:
                torch.mm(logits, weight, out=grad_rows[chunk])
                grad_weight += logits.T @ rows[chunk]
        if needs_gradient:
            ctx.save_for_backward(grad_rows, grad_weight)
        divergence = torch.cat([part.divergence for part in parts])
        probability = torch.cat([part.true_probability for part in parts])
        correct = torch.cat([part.is_correct for part in parts])
        ctx.mark_non_differentiable(divergence, probability, correct)
        return (divergence * targets.row_weights).sum(), divergence, probability, correct

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_rows, grad_weight = ctx.saved_tensors
        scale = grads[0]
        return grad_rows * scale.to(grad_rows.dtype), grad_weight * scale, None, None, None
