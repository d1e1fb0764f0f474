"""One of a hybrid's two drafters, behind its own bounds.

What it cannot serve (a sequence that is too long for it, or for which it has no memory) it lets
go of, and the other serves alone.
"""

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic

from draft_service.drafters.drafter import (
    Continues,
    Drafter,
    FeatureRows,
    Guide,
    Proposal,
    State,
    Wish,
)
from draft_service.drafters.hybrid_trial import Usage
from outrider.engine.sampling import Sampling


class Seat(Generic[State]):
    """One sequence's place with a drafter: its state there, or None once it was let go."""

    __slots__ = ("state", "token_ids")

    def __init__(self, token_ids: "array[int]", state: State | None) -> None:
        self.token_ids = token_ids
        self.state = state


class Part(Generic[State]):
    """A drafter that may be done without. Has what a Drafter has, for seats."""

    def __init__(self, drafter: Drafter[State]) -> None:
        self.drafter = drafter
        self.offer = drafter.offer
        self.usage = Usage()
        self._continues: Continues[State] | None = (
            drafter if isinstance(drafter, Continues) else None
        )

    def open(self, token_ids: "array[int]", sampling: Sampling) -> Seat[State]:
        """A seat, empty where the sequence is too long."""
        if len(token_ids) > self.offer.max_sequence_length:
            return Seat(token_ids, None)
        return Seat(token_ids, self.drafter.open(token_ids, sampling))

    def add_features(self, seat: Seat[State], features: FeatureRows) -> bool:
        """As a Drafter's; True where they are of no use: none needed, or no state any more."""
        state = self._state(seat)
        if state is None or self.offer.feature_needs is None:
            return True
        return self.drafter.add_features(state, features)

    def reserve(self, seat: Seat[State], length: int) -> bool:
        """False where it does not serve the sequence, from now on."""
        state = self._state(seat)
        if state is None:
            return False
        if not self.drafter.reserve(state, min(length, self.offer.max_sequence_length)):
            self.close(seat)
        return seat.state is not None

    def backlog(self, seat: Seat[State]) -> int:
        """As a Drafter's; 0 for an empty seat."""
        state = self._state(seat)
        return 0 if state is None else self.drafter.backlog(state)

    def can_propose(self, seat: Seat[State]) -> bool:
        """A draft may be asked for now."""
        state = self._state(seat)
        return state is not None and self.drafter.backlog(state) <= self.drafter.max_backlog

    def is_due(self, seat: Seat[State], next_commit: int) -> bool:
        """So many more committed tokens would put its drafts out of reach, or they are."""
        backlog = self.backlog(seat)
        return backlog > 0 and backlog + next_commit > self.drafter.max_backlog

    def prepare(self, seats: Sequence[Seat[State]], budget_seconds: float) -> bool:
        """A piece of work on these seats; False where there is none to do."""
        states = [seat.state for seat in seats if self.backlog(seat)]
        behind = [state for state in states if state is not None]
        if behind:
            self.drafter.prepare(behind, budget_seconds)
        return bool(behind)

    def continuation_of(self, seat: Seat[State]) -> Callable[[Sequence[int]], Proposal] | None:
        """What continues drafts that are not its own, until the next commit; None where it cannot
        do that, or cannot be asked.
        """
        if self._continues is None or not self.can_propose(seat) or seat.state is None:
            return None
        return partial(self._continues.continue_from, seat.state)

    def wish(
        self,
        seat: Seat[State],
        draft_length: int,
        finish_by: float,
        guide: Guide | None = None,
    ) -> Wish[State] | None:
        """The wish within this drafter's bounds; None where it cannot be asked."""
        room = self.offer.max_sequence_length - len(seat.token_ids)
        length = min(draft_length, self.offer.max_draft_length, room)
        if length < 1 or not self.can_propose(seat) or seat.state is None:
            return None
        return Wish(seat.state, length, finish_by, guide)

    def close(self, seat: Seat[State]) -> None:
        """Lets the sequence go."""
        if seat.state is not None:
            self.drafter.close(seat.state)
            seat.state = None

    def _state(self, seat: Seat[State]) -> State | None:
        # The live tokens may have gone beyond the bound since the last call.
        if len(seat.token_ids) > self.offer.max_sequence_length:
            self.close(seat)
        return seat.state
