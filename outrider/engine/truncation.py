"""Which tokens top-k, top-p and min-p leave of a distribution. Knows nothing of the draw.

Each keeps a head of the vocabulary in one order, probability descending and then token id
ascending:
    top-k    the first top_k tokens
    top-p    the shortest head whose probability, renormalised after top-k, reaches top_p
    min-p    the tokens with at least min_p times the largest probability
Applied in this order, after the temperature.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def kept_token_ids(
    logits: NDArray[np.float32],
    best: int,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
) -> NDArray[np.int64]:
    """The token ids that stay, ascending; at least `best`, the argmax, is among them.

    logits: float32 [vocab], none NaN or +inf, the largest finite. temperature > 0; top_k = 0,
    top_p = 1 and min_p = 0 are off.
    """
    kept: NDArray[np.int64]
    if 0 < top_k < len(logits):
        kept = _first(logits, top_k, np.partition(logits, len(logits) - top_k)[-top_k])
    elif top_p == 1 and min_p > 0:
        kept = _roughly_in_min_p(logits, float(logits[best]), temperature, min_p)
    else:
        kept = np.arange(len(logits))
    if top_p == 1 and min_p == 0:
        return kept
    scaled: NDArray[np.float64] = logits[kept].astype(np.float64)
    scaled /= temperature
    scaled -= np.float64(logits[best]) / temperature
    with np.errstate(under="ignore"):
        weights = np.exp(scaled, out=scaled)  # the probabilities, over the largest
    if top_p < 1:
        head = _first(weights, *_top_p_head(weights, top_p))
        kept, weights = kept[head], weights[head]
    return kept[weights >= min_p]


def _first(values: NDArray[Any], count: int, boundary: Any) -> NDArray[np.int64]:
    """The indices, ascending, of the first `count` values in the order of all truncations.

    boundary is the last of these values: all larger ones are in, of its equals the lowest ids.
    """
    head = np.flatnonzero(values >= boundary)
    excess = len(head) - count
    if excess:
        tied = np.flatnonzero(values[head] == boundary)
        is_in = np.ones(len(head), dtype=np.bool_)
        is_in[tied[len(tied) - excess :]] = False
        head = head[is_in]
    return head


def _top_p_head(weights: NDArray[np.float64], top_p: float) -> tuple[int, np.float64]:
    """Length and last weight of the shortest head with mass top_p. The largest weight is 1."""
    needed = top_p * float(weights.sum())
    # Sorting is the cost, so only a head that surely holds the needed mass is sorted.
    head = weights
    for floor in (2.0**-6, 2.0**-10, 2.0**-14):
        above = weights[weights >= floor]
        if float(above.sum()) > needed * (1 + 1e-9):
            head = above
            break
    descending = np.sort(head)[::-1]
    count = min(int(np.searchsorted(np.cumsum(descending), needed)) + 1, len(descending))
    return count, descending[count - 1]


def _roughly_in_min_p(
    logits: NDArray[np.float32], largest: float, temperature: float, min_p: float
) -> NDArray[np.int64]:
    """All tokens that min-p keeps and perhaps a few more, without exponentials."""
    slack = 1e-9 + 4 * float(np.spacing(abs(largest) / temperature))
    lowest = largest + (math.log(min_p) - slack) * temperature
    with np.errstate(over="ignore"):
        boundary = np.nextafter(np.float32(lowest), np.float32(-np.inf))
    return np.flatnonzero(logits >= boundary)
