"""The token that a row of logits yields at a position. Exact, stateless, on numpy alone.

Order of processing: temperature, top-k, top-p, min-p; then Gumbel-max with the noise of (seed,
position, token id), so that any two callers with the same logits draw the same token (Daliri,
Musco, Suresh, arXiv 2408.07978). Knows nothing of penalties, bias or grammars: they change the
logits before.

What each truncation keeps: see `truncation`.
"""

import math
import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.engine.noise import gumbel, gumbel_of_hashes, hash_tokens, hash_vocabulary
from outrider.engine.truncation import kept_token_ids

# Below this, float64(logit) / temperature could overflow.
MIN_TEMPERATURE = 1e-200

# Temperatures at which the prefilter's float32 arithmetic is in range.
_PREFILTER_TEMPERATURES = (1e-30, 1e30)

# The prefilter's slack in the exponent. Its float32 errors are below 1e-4 (see `_sample_all`).
_PREFILTER_SLACK = 2.0**-10


class LogitsError(ValueError):
    """A row of logits defines no distribution: NaN, +inf, or -inf throughout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a request wants its tokens drawn. Ranges are checked where requests come in."""

    temperature: float = 1.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    seed: int = 0  # modulo 2**64

    def __post_init__(self) -> None:
        assert self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < math.inf, (
            self.temperature
        )
        assert self.top_k >= 0, self.top_k
        assert 0 < self.top_p <= 1, self.top_p
        assert 0 <= self.min_p <= 1, self.min_p

    @property
    def is_greedy(self) -> bool:
        """The token is the argmax of the logits; truncations and the seed do not matter."""
        return self.temperature == 0

    @property
    def is_truncated(self) -> bool:
        """Some tokens may be excluded before the draw."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def sample(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token id at `position`, its index in prompt + output. logits: float32 [vocab].

    argmax over the kept tokens of float64(logit) / temperature + noise; at temperature 0 the
    argmax of the logits. Ties go to the lowest id. Raises LogitsError.
    """
    best = _checked_argmax(logits)
    if sampling.is_greedy:
        return best
    if sampling.is_truncated:
        kept = _kept(logits, sampling, best)
        return int(kept[_drawn_of_kept(logits[kept], kept, sampling, position)])
    workspace = _workspace(len(logits), threading.get_ident())
    hash_vocabulary(sampling.seed, position, out=workspace.hashes, scratch=workspace.scratch)
    return _sample_all(logits, sampling, best, workspace.hashes)


def sample_among(
    logits: NDArray[np.float32],
    token_ids: NDArray[np.int64],
    sampling: Sampling,
    position: int,
) -> int:
    """The index of the drawn logit, where logits[i] is that of token_ids[i], ascending.

    The token is the one that `sample` draws from a row with these logits and -inf elsewhere.
    Raises LogitsError.
    """
    assert len(logits) == len(token_ids), (len(logits), len(token_ids))
    best = _checked_argmax(logits)
    if sampling.is_greedy:
        return best
    if sampling.is_truncated:
        kept = _kept(logits, sampling, best)
        return int(kept[_drawn_of_kept(logits[kept], token_ids[kept], sampling, position)])
    return _sample_all(logits, sampling, best, hash_tokens(sampling.seed, position, token_ids))


def processed_log_probabilities(
    logits: NDArray[np.float32], sampling: Sampling
) -> NDArray[np.float64]:
    """The log probabilities that `sample` draws from, float64 [vocab], -inf where truncated.

    Temperature 0 is the certainty of the argmax. Raises LogitsError.
    """
    best = _checked_argmax(logits)
    log_probabilities = np.full(len(logits), -np.inf)
    if sampling.is_greedy:
        log_probabilities[best] = 0.0
        return log_probabilities
    kept = _kept(logits, sampling, best)
    relative = _scaled(logits[kept], sampling) - _scaled(logits[best], sampling)
    log_probabilities[kept] = relative - np.log(np.exp(relative).sum())
    return log_probabilities


def _checked_argmax(logits: NDArray[np.float32]) -> int:
    assert logits.ndim == 1 and logits.dtype == np.float32, (logits.shape, logits.dtype)
    if len(logits) == 0:
        raise LogitsError("logits are empty; at least 1 is needed")
    best = int(logits.argmax())  # the first NaN, if there is one
    if not math.isfinite(logits[best]):
        raise LogitsError(
            f"the largest of {len(logits)} logits is {logits[best]} (token id {best}); "
            "it must be finite"
        )
    return best


def _kept(logits: NDArray[np.float32], sampling: Sampling, best: int) -> NDArray[np.int64]:
    return kept_token_ids(
        logits,
        best,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )


def _drawn_of_kept(
    logits: NDArray[np.float32], token_ids: NDArray[np.int64], sampling: Sampling, position: int
) -> int:
    """Gumbel-max over the few logits of these tokens; an index."""
    if len(logits) == 1:
        return 0
    scores = _scaled(logits, sampling)
    scores += gumbel(sampling.seed, position, token_ids)
    return int(scores.argmax())


def _scaled(logits: Any, sampling: Sampling) -> Any:
    return np.float64(logits) / sampling.temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """Buffers of one thread: pages fresh from the system would cost thrice the arithmetic."""

    hashes: NDArray[np.uint64]
    scratch: NDArray[np.uint64]
    ratio: NDArray[np.float32]
    remainder: NDArray[np.float32]


@lru_cache(maxsize=16)
def _workspace(vocabulary_size: int, thread_id: int) -> _Workspace:
    return _Workspace(
        hashes=np.empty(vocabulary_size, dtype=np.uint64),
        scratch=np.empty(vocabulary_size, dtype=np.uint64),
        ratio=np.empty(vocabulary_size, dtype=np.float32),
        remainder=np.empty(vocabulary_size, dtype=np.float32),
    )


def _sample_all(
    logits: NDArray[np.float32], sampling: Sampling, best: int, hashes: NDArray[np.uint64]
) -> int:
    """Gumbel-max over all logits with the noise of these hashes: a float32 bound first, exact
    scores of what it leaves.

    With e = 1 - u and d = (logit - largest logit) / temperature <= 0, -log(u) >= e gives
    noise <= -log(e), so score <= largest scaled logit + log(r) with r = exp(d) / e. A token with
    r < exp(s - largest scaled logit), s any token's exact score, cannot win; s is taken from the
    token with the largest r, which nearly always wins. No r overflows: exp(d) <= 1, e >= 2**-53.

    The bound matters only where r >= exp(-3.7) (the least noise is -log(53 log 2) = -3.61), so
    where d > -41: there d is wrong by at most 41 * 3 * 2**-24 and log(r) by less than 1e-4 in all.
    What float64 rounding may do to the scores is added to the slack.
    """
    workspace = _workspace(len(logits), threading.get_ident())
    scratch, ratio = workspace.scratch, workspace.ratio
    low, high = _PREFILTER_TEMPERATURES
    if not low <= sampling.temperature <= high:
        return _exact_argmax(logits, sampling, hashes)
    with np.errstate(over="ignore", under="ignore"):
        np.subtract(logits, logits[best], out=ratio)
        ratio *= np.float32(1 / sampling.temperature)
        np.exp(ratio, out=ratio)
    # 2**52 * e = (2**52 - 1 - k) + 0.5, where 2**52 - 1 - k is the complement's upper 52 bits.
    np.invert(hashes, out=scratch)
    scratch >>= np.uint64(12)
    remainder = workspace.remainder
    np.copyto(remainder, scratch.view(np.int64), casting="same_kind")
    remainder += np.float32(0.5)
    ratio /= remainder
    likely = int(ratio.argmax())
    largest = float(_scaled(logits[best], sampling))
    score = float(_scaled(logits[likely], sampling) + gumbel_of_hashes(hashes[[likely]])[0])
    slack = _PREFILTER_SLACK + 4 * float(np.spacing(abs(largest) + 41))
    threshold = math.exp(score - largest - slack) * 2.0**-52
    candidates = np.flatnonzero(ratio >= np.float32(threshold))
    if len(candidates) == 1:
        return int(candidates[0])
    return int(candidates[_exact_argmax(logits[candidates], sampling, hashes[candidates])])


def _exact_argmax(
    logits: NDArray[np.float32], sampling: Sampling, hashes: NDArray[np.uint64]
) -> int:
    scores = _scaled(logits, sampling)
    scores += gumbel_of_hashes(hashes)
    return int(scores.argmax())
