"""The next token of every row: the likeliest plus temperature times Gumbel noise, so that
temperature 0 is greedy and any other draws from the tempered distribution (the Gumbel-max trick).
"""

from collections.abc import Callable
from typing import Final

import torch

# (logits [B, vocab], temperatures [B, 1], margins [B, 1], step number [1]) -> tokens [B].
# A token whose logit is below the row's best plus the margin (0 or less) is not drawn.
TokenChoice = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Rows whose noise exists at a time.
_ROWS: Final = 256


class ChoiceMismatch(RuntimeError):
    """The choice kernel does not choose as it should on this device."""


def plain_choice(
    logits: torch.Tensor, temperatures: torch.Tensor, margins: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """With torch's own generator; the step number is not needed then."""
    chosen = []
    for start in range(0, len(logits), _ROWS):
        part = slice(start, start + _ROWS)
        scores = logits[part].float()
        floor = scores.amax(dim=1, keepdim=True) + margins[part]
        # -log of an exponential variable is a Gumbel variable; 0 would make it infinite.
        noise = torch.empty_like(scores).exponential_().clamp_(min=1e-30).log_()
        noisy = torch.addcmul(scores, temperatures[part], noise, value=-1.0)
        chosen.append(noisy.masked_fill_(scores < floor, -torch.inf).argmax(dim=1))
    return torch.cat(chosen)


def checked_kernel_choice(like: torch.Tensor) -> TokenChoice:
    """The kernel, once it has chosen as `plain_choice` may on random logits of `like`'s dtype.

    Raises ImportError without triton and ChoiceMismatch where a choice is wrong.
    """
    from training.decode_kernel import fused_choice

    rows, vocab_size = 96, 5000
    logits = (4 * torch.randn(rows, vocab_size, device=like.device)).to(like.dtype)
    temperatures = torch.zeros(rows, 1, device=like.device)
    temperatures[rows // 3 :] = 1.0
    margins = torch.full((rows, 1), -torch.inf, device=like.device)
    margins[2 * rows // 3 :] = -2.0
    step = torch.zeros(1, dtype=torch.long, device=like.device)
    chosen = fused_choice(logits, temperatures, margins, step)
    found = logits.gather(1, chosen.unsqueeze(1)).float()
    behind = (logits.float().amax(dim=1, keepdim=True) - found).squeeze(1).tolist()
    greedy, drawn, near = (behind[third * rows // 3 :][: rows // 3] for third in range(3))
    if max(greedy) > 0 or not 0 < max(drawn) or not 0 < max(near) <= 2.0:
        raise ChoiceMismatch(
            f"choice kernel: chosen logits lie up to {max(greedy)} (greedy), {max(drawn)} (drawn), "
            f"{max(near)} (drawn within 2) below the best"
        )
    return fused_choice
