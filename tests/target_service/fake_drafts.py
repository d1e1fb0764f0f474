"""Draft sources for tests: right, wrong, random, absent."""

from collections.abc import Callable, Mapping, Sequence

from target_service.drafts import NOTHING_COLLECTED, Collected
from target_service.sequence import Sequence as TokenSequence

Propose = Callable[[TokenSequence, int], Sequence[int]]


class FakeDrafts:
    """A DraftSource that answers every ask with `propose(sequence, draft_length)`."""

    def __init__(self, propose: Propose) -> None:
        self._propose = propose
        self._lengths: dict[int, int] = {}
        self.reason: str | None = None
        self.live: set[int] = set()
        self.asks: list[dict[int, int]] = []
        self.patience: list[float] = []
        self.flushes: list[bool] = []

    def unavailable(self, *, patience_seconds: float) -> str | None:
        return self.reason

    def started(self, sequences: Sequence[TokenSequence]) -> None:
        self.live.update(sequence.arrival for sequence in sequences)

    def stopped(self, sequence: TokenSequence) -> None:
        self.live.remove(sequence.arrival)

    def tap(self) -> None:
        return None

    def ask(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Mapping[int, int],
        *,
        decode_rows: int,
        patience_seconds: float,
    ) -> bool:
        assert {sequence.arrival for sequence in sequences} == set(draft_lengths)
        self._lengths = dict(draft_lengths)
        self.asks.append(self._lengths)
        self.patience.append(patience_seconds)
        return True

    def collect(
        self, sequences: Sequence[TokenSequence], *, has_news: Callable[[], bool]
    ) -> Collected:
        lengths, self._lengths = self._lengths, {}
        if not lengths:
            return NOTHING_COLLECTED
        drafts = {}
        for sequence in sequences:
            if sequence.arrival in lengths:
                draft = tuple(self._propose(sequence, lengths[sequence.arrival]))
                if draft:
                    drafts[sequence.arrival] = draft
        return Collected(drafts=drafts, waited_seconds=0.0, is_answered=True)

    def flush(self, *, is_bypassed: bool) -> None:
        self.flushes.append(is_bypassed)

    def observe(
        self,
        *,
        collected: Collected,
        decode_rows: int,
        seconds: float,
        emitted_tokens: int,
        is_pure: bool,
    ) -> None:
        assert seconds >= 0
