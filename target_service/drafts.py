"""Where a step's drafts come from, as the step loop sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.feature_tap import Tap
from target_service.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """Drafts for one step, by the sequence's arrival; sequences without one are not in it."""

    drafts: Mapping[int, tuple[int, ...]]
    waited_seconds: float
    is_answered: bool


NOTHING_COLLECTED = Collected(drafts={}, waited_seconds=0.0, is_answered=False)


class DraftSource(Protocol):
    """A source of drafts. Called on the engine's thread only; never raises for what a peer does."""

    def unavailable(self, *, patience_seconds: float) -> str | None:
        """Why nothing can be asked for now (a bypass reason of policy.py), or None."""

    def started(self, sequences: Sequence[TokenSequence]) -> None:
        """Sequences that begin to run."""

    def stopped(self, sequence: TokenSequence) -> None:
        """A running sequence that ended or was preempted."""

    def tap(self) -> Tap | None:
        """What is to capture the coming forward's hidden states; None where no drafter needs
        them.
        """

    def ask(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Mapping[int, int],
        *,
        decode_rows: int,
        patience_seconds: float,
    ) -> bool:
        """Asks for drafts for some of the next step's decode rows; False where it does not, since
        they would most likely come too late.

        `draft_lengths` is by arrival, each above 0. With patience, the step may wait so long.
        """

    def collect(
        self, sequences: Sequence[TokenSequence], *, has_news: Callable[[], bool]
    ) -> Collected:
        """The drafts asked for before, valid for the sequences as they are now.

        A patient wait ends once `has_news` says that somebody else wants something.
        """

    def flush(self, *, is_bypassed: bool) -> None:
        """The end of a step that asked for nothing: sends what was held back, unless the step is
        bypassed.
        """

    def observe(
        self,
        *,
        collected: Collected,
        decode_rows: int,
        seconds: float,
        emitted_tokens: int,
        is_pure: bool,
    ) -> None:
        """What a step took, without its wait. `is_pure`: it had no prefill rows."""
