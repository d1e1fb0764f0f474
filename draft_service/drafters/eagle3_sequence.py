"""What the EAGLE-3 drafter holds of one sequence: its tokens, features that wait, and its cache."""

from array import array

import torch

from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows


class Eagle3Sequence:
    """One sequence. Its row of position p takes token p + 1 and the feature of position p.

    The cache holds the rows from `first_position` on: features may begin in mid-sequence, and a
    window drops leading blocks. Rows up to `next_position` were run with the target's features;
    behind them lie a draft's own, which the next true ones overwrite.
    """

    __slots__ = (
        "_last_feature",
        "_waiting",
        "block_table",
        "first_position",
        "has_features",
        "next_position",
        "num_waiting",
        "sampling",
        "token_ids",
    )

    def __init__(self, token_ids: "array[int]", sampling: Sampling) -> None:
        self.token_ids = token_ids
        self.sampling = sampling
        self.block_table: list[int] = []
        self.has_features = False
        self.first_position = 0
        self.next_position = 0
        # Features of the positions from next_position on.
        self.num_waiting = 0
        self._waiting: list[torch.Tensor] = []
        # That of the row before next_position, [1, hidden_size]; empty before the first row.
        self._last_feature: list[torch.Tensor] = []

    @property
    def backlog(self) -> int:
        """Rows that can be run with true features now."""
        # The last token has a row only when the token behind it is known.
        return max(0, min(self.num_waiting, self.length - 1 - self.next_position))

    @property
    def is_ready(self) -> bool:
        """Nothing but the backlog is between the features and the next token."""
        return self.has_features and self.first_position < self.length - 1 <= self.features_end

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.token_ids)

    @property
    def features_end(self) -> int:
        """Position behind the last one with a feature."""
        return self.next_position + self.num_waiting

    def begin(self, position: int) -> None:
        """The position of the first feature ever."""
        self.has_features = True
        self.first_position = self.next_position = position

    def append_features(self, features: torch.Tensor) -> None:
        """Those of the positions from features_end on."""
        self._waiting.append(features)
        self.num_waiting += len(features)

    def extend(self, count: int, num_logits: int) -> tuple[SequenceRows, torch.Tensor]:
        """The next `count` rows of the backlog, which count as run from now on.

        With none the last one again: its keys are in the cache, its logits are not.
        """
        if count == 0:
            (features,) = self._last_feature
            return self._rows(self.next_position - 1, 1, num_logits), features
        waiting = self._waiting[0] if len(self._waiting) == 1 else torch.cat(self._waiting)
        features = waiting[:count]
        self._waiting = [waiting[count:]] if count < len(waiting) else []
        # A copy: a view would keep the whole prompt's features.
        self._last_feature = [features[-1:].clone()]
        rows = self._rows(self.next_position, count, num_logits)
        self.next_position += count
        self.num_waiting -= count
        return rows, features

    def draft_row(self, token_id: int, position: int) -> SequenceRows:
        """The row of a position whose feature is the head's own output."""
        return SequenceRows(
            token_ids=(token_id,),
            start=position - self.first_position,
            block_table=self.block_table,
            num_logits=1,
            position_offset=self.first_position,
        )

    def drop_behind(self, window: int, block_size: int) -> list[int]:
        """Gives up leading blocks as long as `window` rows stay; returns them."""
        num_rows = self.next_position - self.first_position
        count = max(0, (num_rows - window) // block_size)
        dropped = self.block_table[:count]
        del self.block_table[:count]
        self.first_position += count * block_size
        return dropped

    def _rows(self, position: int, count: int, num_logits: int) -> SequenceRows:
        return SequenceRows(
            token_ids=self.token_ids[position + 1 : position + 1 + count].tolist(),
            start=position - self.first_position,
            block_table=self.block_table,
            num_logits=num_logits,
            position_offset=self.first_position,
        )
