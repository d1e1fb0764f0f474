"""The DraftSource of a target without a draft service."""

from collections.abc import Callable, Mapping, Sequence

from outrider.engine.feature_tap import Tap
from target_service.drafts import NOTHING_COLLECTED, Collected
from target_service.policy import NO_DRAFT_SERVICE
from target_service.sequence import Sequence as TokenSequence


class NoDrafts:
    """Never has anything."""

    def unavailable(self, *, patience_seconds: float) -> str | None:
        return NO_DRAFT_SERVICE

    def started(self, sequences: Sequence[TokenSequence]) -> None:
        pass

    def stopped(self, sequence: TokenSequence) -> None:
        pass

    def tap(self) -> Tap | None:
        return None

    def ask(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Mapping[int, int],
        *,
        decode_rows: int,
        patience_seconds: float,
    ) -> bool:
        raise AssertionError("there is no draft service to ask")

    def collect(
        self, sequences: Sequence[TokenSequence], *, has_news: Callable[[], bool]
    ) -> Collected:
        return NOTHING_COLLECTED

    def flush(self, *, is_bypassed: bool) -> None:
        pass

    def observe(
        self,
        *,
        collected: Collected,
        decode_rows: int,
        seconds: float,
        emitted_tokens: int,
        is_pure: bool,
    ) -> None:
        pass
