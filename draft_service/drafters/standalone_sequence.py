"""What a standalone drafter holds of one sequence: its tokens, and what of them its cache has."""

from array import array

from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows


class StandaloneSequence:
    """One sequence: its live tokens, its blocks, and what of it lies in the KV cache."""

    __slots__ = ("block_table", "cached_length", "draft_tail", "sampling", "token_ids")

    def __init__(self, token_ids: "array[int]", sampling: Sampling) -> None:
        self.token_ids = token_ids
        self.sampling = sampling
        self.block_table: list[int] = []
        # Keys and values of so many committed tokens are in the cache,
        self.cached_length = 0
        # and behind them those of these draft tokens.
        self.draft_tail: list[int] = []

    def settle(self) -> None:
        """Keeps of the draft tail what was committed since; the rest will be overwritten."""
        tokens, tail = self.token_ids, self.draft_tail
        kept = 0
        while (
            kept < len(tail)
            and self.cached_length < len(tokens)
            and tokens[self.cached_length] == tail[kept]
        ):
            kept += 1
            self.cached_length += 1
        self.draft_tail = tail[kept:] if self.cached_length == len(tokens) else []

    def rows(self, count: int, num_logits: int) -> SequenceRows:
        """The next `count` committed tokens that are not in the cache."""
        start = self.cached_length
        return SequenceRows(
            token_ids=self.token_ids[start : start + count].tolist(),
            start=start,
            block_table=self.block_table,
            num_logits=num_logits,
        )
