"""One draft that is asked of a whole model on a GPU."""

from dataclasses import dataclass

from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChain:
    """A sequence's missing rows, and how many tokens to draw behind them."""

    # Committed tokens that are not in the cache, at most max_draft_length + 1 and all with logits;
    # the block table covers the draft too, but for its last token.
    rows: SequenceRows
    sampling: Sampling
    draft_length: int

    @property
    def length(self) -> int:
        """Committed tokens: the position of the first token drafted."""
        return self.rows.start + len(self.rows.token_ids)
