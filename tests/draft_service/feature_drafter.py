"""A drafter that needs features and shows what it was given, and the columns that carry them."""

import hashlib
from array import array
from collections.abc import Sequence

from draft_service.drafters.drafter import (
    NO_PROPOSAL,
    DrafterOffer,
    FeatureNeeds,
    FeatureRows,
    Proposal,
    Wish,
)
from outrider.engine.sampling import Sampling
from outrider.serving.columns import pack
from outrider.serving.shared_ring import SharedRing

HIDDEN_SIZE = 6
ROW_BYTES = 4


def needs_of(projection: bytes = b"weights") -> FeatureNeeds:
    return FeatureNeeds(
        layer_ids=(1, 3),
        width=ROW_BYTES // 2,
        dtype="bfloat16",
        projection_sha256=hashlib.sha256(projection).hexdigest(),
        target_hidden_size=HIDDEN_SIZE,
        projection=projection,
    )


def rows_of(first_position: int, count: int) -> bytes:
    """Rows that say their position."""
    return pack(range(first_position, first_position + count), "<u4")


class FeatureSequence:
    """One sequence: row p is made of token p + 1 and the features of p."""

    def __init__(self, token_ids: "array[int]") -> None:
        self.token_ids = token_ids
        self.first_position: int | None = None
        self.features = b""
        self.worked_length = 0

    @property
    def workable_length(self) -> int:
        if self.first_position is None:
            return 0
        return min(self.first_position + len(self.features) // ROW_BYTES, len(self.token_ids) - 1)


class FeatureDrafter:
    """Proposes the number of features that it has worked on, once all committed ones are there."""

    max_backlog = 2
    rows_per_piece = 4

    def __init__(self, projection: bytes = b"weights", *, max_sequence_length: int = 1000) -> None:
        self.offer = DrafterOffer(
            name="fake",
            fingerprint="f",
            max_draft_length=4,
            max_sequence_length=max_sequence_length,
            feature_needs=needs_of(projection),
        )
        self.given: list[FeatureRows] = []
        self.states: list[FeatureSequence] = []
        self.piece_count = 0
        self.reserves = True

    def open(self, token_ids: "array[int]", sampling: Sampling) -> FeatureSequence:
        self.states.append(FeatureSequence(token_ids))
        return self.states[-1]

    def add_features(self, state: FeatureSequence, features: FeatureRows) -> bool:
        self.given.append(features)
        assert len(features.rows) % ROW_BYTES == 0
        if state.first_position is None:
            state.first_position = state.worked_length = features.first_position
        end = state.first_position + len(state.features) // ROW_BYTES
        if features.first_position > end:
            return False
        state.features += features.rows[(end - features.first_position) * ROW_BYTES :]
        return True

    def reserve(self, state: FeatureSequence, length: int) -> bool:
        return self.reserves

    def backlog(self, state: FeatureSequence) -> int:
        """The features that have not come are a backlog as well."""
        return len(state.token_ids) - 1 - state.worked_length

    def prepare(self, states: Sequence[FeatureSequence], budget_seconds: float) -> None:
        self.piece_count += 1
        room = self.rows_per_piece
        for state in states:
            count = min(room, state.workable_length - state.worked_length)
            state.worked_length += count
            room -= count

    def propose(self, wishes: Sequence[Wish[FeatureSequence]]) -> list[Proposal]:
        proposals = []
        for state, _, _, _ in wishes:
            assert self.backlog(state) <= self.max_backlog
            state.worked_length = state.workable_length
            is_ready = self.backlog(state) == 0
            proposals.append(Proposal([state.worked_length]) if is_ready else NO_PROPOSAL)
        return proposals

    def close(self, state: FeatureSequence) -> None:
        self.states.remove(state)


def inline_columns(*features: tuple[int, int] | None) -> dict[str, bytes]:
    """A Step's columns: (first position, count) of each row, or None."""
    given = [each or (0, 0) for each in features]
    return {
        "feature_first_positions": pack([first for first, _ in given], "<u4"),
        "feature_counts": pack([count for _, count in given], "<u4"),
        "inline_features": b"".join(rows_of(*each) for each in given),
    }


def shared_columns(ring: SharedRing, *features: tuple[int, int] | None) -> dict[str, bytes]:
    """The same, the rows put into the ring."""
    columns = inline_columns(*features)
    del columns["inline_features"]
    offsets = [ring.write(rows_of(*(each or (0, 0)))) for each in features]
    return {**columns, "shared_memory_offsets": pack(offsets, "<u8")}
