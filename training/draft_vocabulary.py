"""Which token ids a head can draft: those that the target writes most often."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.data import RowSet

# The output head is a matrix product: whole tiles of it.
SIZE_MULTIPLE = 64


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """Ascending target ids; the index of an id is its id in the draft vocabulary."""

    ids: npt.NDArray[np.int64]  # [size]
    coverage: float  # share of the answers' tokens that can be drafted


def choose_draft_vocabulary(
    rows: RowSet, *, size: int, vocab_size: int, always: Iterable[int]
) -> DraftVocabulary:
    """The `size` most frequent ids of the answers, `always` among them; equals by lower id.

    `always` is for ids that end or shape every answer, however few there are (end of sequence).
    Raises ValueError for a size that does not fit, or data with ids beyond the vocabulary.
    """
    forced = sorted(set(always))
    if not max(1, len(forced)) <= size <= vocab_size:
        raise ValueError(
            f"draft vocabulary of {size} ids: must be {max(1, len(forced))} to {vocab_size}"
        )
    written = rows.tokens[rows.answer_mask()]
    if len(rows.tokens) and int(rows.tokens.max()) >= vocab_size:
        raise ValueError(
            f"the data has token id {int(rows.tokens.max())}, and the target's vocabulary has "
            f"{vocab_size}: it was written by another target"
        )
    counts = np.bincount(written, minlength=vocab_size).astype(np.int64)
    rank = counts.copy()
    rank[forced] = np.iinfo(np.int64).max
    chosen = np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)
    return DraftVocabulary(chosen, covered_share(rows, chosen))


def covered_share(rows: RowSet, ids: npt.NDArray[np.int64]) -> float:
    """Share of the answers' tokens that are among `ids`; 0 without answers."""
    written = rows.tokens[rows.answer_mask()]
    return float(np.isin(written, ids).mean()) if len(written) else 0.0


def largest_size(*, fixed_bytes: int, bytes_per_id: int, max_bytes: int, vocab_size: int) -> int:
    """The most ids, a multiple of SIZE_MULTIPLE, whose file stays below `max_bytes`.

    A vocabulary that fits whole is taken whole. Raises ValueError where nothing fits.
    """
    fitting = (max_bytes - 1 - fixed_bytes) // bytes_per_id
    if fitting >= vocab_size:
        return vocab_size
    size = int(fitting) // SIZE_MULTIPLE * SIZE_MULTIPLE
    if size < SIZE_MULTIPLE:
        raise ValueError(
            f"{max_bytes} bytes hold no head: {fixed_bytes} are needed before the first token id"
        )
    return size
