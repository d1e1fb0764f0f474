"""A drafter that proposes what a test says, and keeps what it was asked."""

from array import array
from collections.abc import Callable, Sequence

from draft_service.drafters.drafter import (
    DrafterOffer,
    FeatureNeeds,
    FeatureRows,
    Proposal,
    Wish,
)
from outrider.engine.sampling import Sampling

Script = Callable[[Sequence[int], int], Proposal]


class ScriptedSequence:
    def __init__(self, token_ids: "array[int]") -> None:
        self.token_ids = token_ids
        self.worked_length = 0


class ScriptedDrafter:
    """`script` gets the committed tokens and the draft length. Works off 4 tokens in a piece."""

    def __init__(
        self,
        script: Script,
        *,
        name: str = "scripted",
        max_backlog: int = 16,
        max_draft_length: int = 32,
        max_sequence_length: int = 1000,
        feature_needs: FeatureNeeds | None = None,
    ) -> None:
        self.script = script
        self.max_backlog = max_backlog
        self.offer = DrafterOffer(
            name=name,
            fingerprint=f"fingerprint of {name}",
            max_draft_length=max_draft_length,
            max_sequence_length=max_sequence_length,
            feature_needs=feature_needs,
        )
        self.memory = 10**9  # tokens that a sequence may reserve
        self.states: list[ScriptedSequence] = []
        self.batches: list[list[Wish[ScriptedSequence]]] = []
        self.given: list[FeatureRows] = []
        self.piece_count = 0

    def open(self, token_ids: "array[int]", sampling: Sampling) -> ScriptedSequence:
        self.states.append(ScriptedSequence(token_ids))
        return self.states[-1]

    def add_features(self, state: ScriptedSequence, features: FeatureRows) -> bool:
        assert self.offer.feature_needs is not None
        self.given.append(features)
        return features.first_position == 0

    def reserve(self, state: ScriptedSequence, length: int) -> bool:
        assert length <= self.offer.max_sequence_length
        return length <= self.memory

    def backlog(self, state: ScriptedSequence) -> int:
        assert len(state.token_ids) <= self.offer.max_sequence_length
        return len(state.token_ids) - state.worked_length

    def prepare(self, states: Sequence[ScriptedSequence], budget_seconds: float) -> None:
        assert states
        self.piece_count += 1
        room = 4
        for state in states:
            assert self.backlog(state)
            count = min(room, self.backlog(state))
            state.worked_length += count
            room -= count

    def propose(self, wishes: Sequence[Wish[ScriptedSequence]]) -> list[Proposal]:
        assert wishes
        self.batches.append(list(wishes))
        for state, draft_length, _, _ in wishes:
            assert self.backlog(state) <= self.max_backlog
            assert 1 <= draft_length <= self.offer.max_draft_length
            assert len(state.token_ids) + draft_length <= self.offer.max_sequence_length
            state.worked_length = len(state.token_ids)
        return [self.script(wish.state.token_ids, wish.draft_length) for wish in wishes]

    def close(self, state: ScriptedSequence) -> None:
        self.states.remove(state)
