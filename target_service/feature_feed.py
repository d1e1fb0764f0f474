"""Which features of which open sequence the draft service was sent, and what goes next.

Owned by the engine's thread. Knows positions and numbers of rows, not messages.
"""

from collections.abc import Sequence

from target_service.codec import FeatureRows
from target_service.link_features import LinkFeatures
from target_service.sequence import Sequence as TokenSequence


class FeatureFeed:
    """One stream's cursors, by the sequence's arrival. A cursor is the next position to send.

    Only features of cached tokens are ever sent: they are those of committed tokens but the last,
    and nothing that a rejected draft left behind is among them.
    """

    def __init__(self, features: LinkFeatures) -> None:
        self._features = features
        self._cursors: dict[int, int] = {}
        # Sequences that are fed without being asked for a draft: their prompt is being worked on,
        # or more is missing than one step may send.
        self._hungry: dict[int, TokenSequence] = {}

    def opened(self, sequence: TokenSequence) -> None:
        """It has been sent no features. They begin where the store has them all."""
        self._cursors[sequence.arrival] = self._features.tap.store.valid_from(
            sequence.block_table, sequence.cached_length
        )
        self._hungry[sequence.arrival] = sequence

    def closed(self, arrival: int) -> None:
        """It is not open any more; unknown ones are ignored."""
        self._cursors.pop(arrival, None)
        self._hungry.pop(arrival, None)

    def rests(self, arrival: int) -> None:
        """It is fed no more unless it is asked for a draft."""
        self._hungry.pop(arrival, None)

    def missing(self, sequence: TokenSequence) -> int:
        """Rows that are there and were not sent."""
        return sequence.cached_length - self._cursors[sequence.arrival]

    def to_be_completed(
        self, sequences: Sequence[TokenSequence], *, budget: int, steady_rows: int
    ) -> tuple[list[bool], int]:
        """Which of them can be sent all that they miss in this step, and what that leaves of the
        budget (in rows). The others are to be fed.

        `steady_rows`: what a step with a draft gives at most; so few are always sent. Otherwise
        those that miss least come first, so that none waits behind another's long past.
        """
        missing = [self.missing(sequence) for sequence in sequences]
        if sum(missing) <= budget:
            return [True] * len(sequences), budget - sum(missing)
        chosen = [False] * len(sequences)
        for index in sorted(range(len(sequences)), key=missing.__getitem__):
            if missing[index] <= max(steady_rows, budget):
                chosen[index] = True
                budget = max(budget - missing[index], 0)
            else:
                self._hungry[sequences[index].arrival] = sequences[index]
        return chosen, budget

    def hungry(self) -> list[TokenSequence]:
        """Those that are to be fed, and miss something now."""
        for arrival, sequence in list(self._hungry.items()):
            if sequence.is_decoding and not self.missing(sequence):
                del self._hungry[arrival]
        return [sequence for sequence in self._hungry.values() if self.missing(sequence)]

    def take(self, sequence: TokenSequence, limit: int | None = None) -> FeatureRows | None:
        """The next rows, at most `limit`; None if there are none. They count as sent."""
        start = self._cursors[sequence.arrival]
        end = sequence.cached_length
        if limit is not None:
            end = min(end, start + limit)
        if end <= start:
            return None
        self._cursors[sequence.arrival] = end
        rows = self._features.tap.store.rows_of(sequence.block_table, start, end)
        return FeatureRows(first_position=start, rows=rows)
