"""One sequence's verdict from logits that are on the host."""

import numpy as np
import numpy.typing as npt

from outrider.engine.acceptance import Verdict, verify
from outrider.engine.sampling import sample
from outrider.engine.verify_step import SequenceStep


def verdict_of(sequence: SequenceStep, logits: npt.NDArray[np.float32]) -> Verdict:
    """`logits` [1 + draft length, vocab]: row i follows the first i draft tokens. Draws no further
    than the draft is right. Raises LogitsError.
    """
    sampling, ruled = sequence.sampling, sequence.ruled
    assert sampling is not None
    draft_length, token_ids = sequence.draft_length, sequence.rows.token_ids
    drafts = token_ids[len(token_ids) - draft_length :]

    def target_token(index: int) -> int:
        row = logits[index]
        if ruled is not None:
            row = ruled.apply(row, drafts[:index])
        return sample(row, sampling, sequence.base_length + index)

    return verify(drafts, target_token)
