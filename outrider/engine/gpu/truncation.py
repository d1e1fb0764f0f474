"""Top-k, top-p and min-p on the device: what `outrider.engine.truncation` keeps, on whole batches.

Rules and order are that module's: temperature, top-k, top-p of what top-k left, min-p; probability
descending and then token id ascending.
"""

import torch


def truncate_(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Sets what is not kept to -inf in logits [rows, vocabulary].

    temperatures float64, top_k int64 (0 = off), top_p and min_p float64 (1 and 0 = off), all
    [rows]; rows at temperature 0 stay as they are. Does not wait for the device.
    """
    vocabulary = logits.shape[1]
    is_greedy = temperatures == 0
    heat = torch.where(is_greedy, 1.0, temperatures)[:, None]
    ordered, order = torch.sort(logits.float(), dim=1, descending=True, stable=True)
    relative = ((ordered.double() / heat) - (ordered[:, :1].double() / heat)).exp()
    rank = torch.arange(vocabulary, device=logits.device)
    most = torch.where(top_k > 0, top_k, vocabulary)[:, None]
    in_top_k = rank < most
    weights = torch.where(in_top_k, relative, 0.0)
    # Probability of the tokens before each, among those that top-k left.
    before = weights.cumsum(1) - weights
    bound = (top_p * weights.sum(1))[:, None]
    in_top_p = (before < bound) | (top_p == 1)[:, None]
    in_min_p = relative >= min_p[:, None]
    kept = in_top_k & in_top_p & in_min_p | is_greedy[:, None]
    kept[:, 0] = True
    is_kept = torch.empty_like(kept).scatter_(1, order, kept)
    logits.masked_fill_(~is_kept, float("-inf"))
