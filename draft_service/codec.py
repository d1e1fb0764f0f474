"""Link messages of the draft's side: a Step's columns into rows, and rows into answers.

It checks what must hold to tell rows apart, and nothing about what they say.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from draft_service.feature_columns import NO_FEATURES, SentFeatures, features_of_step
from outrider.serving.columns import MalformedColumn, pack, unpack
from outrider.serving.link_protocol import (
    BASE_LENGTH,
    COMMIT_COUNT,
    DRAFT_LENGTH,
    GENERATION,
    HELD_LENGTH,
    PREFIX_HASH,
    REFUSE_REASON,
    SLOT,
    TOKEN_COUNT,
    TOKEN_ID,
)
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2

# Most that the field holds; --step-timeout may allow more.
LONGEST_BUILD_US = 2**32 - 1


class StepRow(NamedTuple):
    """One sequence of a Step, as it came."""

    slot: int
    generation: int
    base_length: int
    prefix_hash: int
    commit_count: int
    # None where the count reaches beyond the column.
    token_ids: Sequence[int] | None
    draft_length: int
    features: SentFeatures


class DecodedStep(NamedTuple):
    """A Step's rows. `is_aligned`: its counts add up to its tokens, so no row has another's.

    `feature_fault`: why its feature columns were left out, if they were.
    """

    rows: list[StepRow]
    is_aligned: bool
    feature_fault: MalformedColumn | None


class DraftRow(NamedTuple):
    """One answered row."""

    row: StepRow
    token_ids: Sequence[int]


def decode_step(
    step: draft_pb2.Step,
    *,
    max_rows: int,
    feature_row_bytes: int,
    feature_ring: SharedRing | None,
) -> DecodedStep:
    """The rows. Raises MalformedColumn if they are too many or cannot be told apart.

    Malformed feature columns cost the features alone. feature_row_bytes = 0: they are not looked
    at.
    """
    slots = unpack("slots", step.slots, SLOT)
    size = len(slots)
    if size > max_rows:
        raise MalformedColumn(f"slots has {size} rows, must be at most max_sequences {max_rows}")
    generations = unpack("generations", step.generations, GENERATION, size)
    base_lengths = unpack("base_lengths", step.base_lengths, BASE_LENGTH, size)
    prefix_hashes = unpack("prefix_hashes", step.prefix_hashes, PREFIX_HASH, size)
    counts = unpack("commit_counts", step.commit_counts, COMMIT_COUNT, size)
    draft_lengths = unpack("draft_lengths", step.draft_lengths, DRAFT_LENGTH, size)
    tokens = whole_numbers(step.commit_token_ids)
    features, feature_fault = [NO_FEATURES] * size, None
    if feature_row_bytes:
        try:
            features = features_of_step(step, size, row_bytes=feature_row_bytes, ring=feature_ring)
        except MalformedColumn as error:
            feature_fault = error
    rows = []
    start = 0
    for index in range(size):
        end = start + counts[index]
        rows.append(
            StepRow(
                slots[index],
                generations[index],
                base_lengths[index],
                prefix_hashes[index],
                counts[index],
                tokens[start:end] if end <= len(tokens) else None,
                draft_lengths[index],
                features[index],
            )
        )
        start = end
    return DecodedStep(rows, start * 4 == len(step.commit_token_ids), feature_fault)


def whole_numbers(token_column: bytes) -> list[int]:
    """The tokens of a column, without a torn last one."""
    return np.frombuffer(token_column, dtype=TOKEN_ID, count=len(token_column) // 4).tolist()  # type: ignore[no-any-return]


def encode_draft(
    *,
    draft_boot_id: int,
    target_boot_id: int,
    stream_epoch: int,
    step_id: int,
    rows: Sequence[DraftRow],
    build_us: int,
) -> draft_pb2.LinkResponse:
    """The answer to a Step: every draft is a chain that continues the committed prefix."""
    return draft_pb2.LinkResponse(
        draft=draft_pb2.Draft(
            draft_boot_id=draft_boot_id,
            target_boot_id=target_boot_id,
            stream_epoch=stream_epoch,
            step_id=step_id,
            slots=pack([row.slot for row, _ in rows], SLOT),
            generations=pack([row.generation for row, _ in rows], GENERATION),
            base_lengths=pack([row.base_length for row, _ in rows], BASE_LENGTH),
            prefix_hashes=pack([row.prefix_hash for row, _ in rows], PREFIX_HASH),
            token_counts=pack([len(token_ids) for _, token_ids in rows], TOKEN_COUNT),
            token_ids=pack(list(chain.from_iterable(token_ids for _, token_ids in rows)), TOKEN_ID),
            build_us=min(build_us, LONGEST_BUILD_US),
        )
    )


class RowReplies:
    """Rows that must be opened again, and rows that will not be served; of one message."""

    def __init__(self, target_boot_id: int, stream_epoch: int) -> None:
        self._target_boot_id = target_boot_id
        self._stream_epoch = stream_epoch
        self._resync: list[tuple[int, int, int]] = []
        self._refuse: list[tuple[int, int, int]] = []

    def resync(self, slot: int, generation: int, held_length: int) -> None:
        """Open it again."""
        self._resync.append((slot, generation, held_length))

    def refuse(self, slot: int, generation: int, reason: int) -> None:
        """It will not be served."""
        self._refuse.append((slot, generation, reason))

    def encode(self) -> list[draft_pb2.LinkResponse]:
        """No message, one or two."""
        responses = []
        if self._resync:
            slots, generations, held_lengths = zip(*self._resync, strict=True)
            responses.append(
                draft_pb2.LinkResponse(
                    resync=draft_pb2.Resync(
                        target_boot_id=self._target_boot_id,
                        stream_epoch=self._stream_epoch,
                        slots=pack(slots, SLOT),
                        generations=pack(generations, GENERATION),
                        held_lengths=pack(held_lengths, HELD_LENGTH),
                    )
                )
            )
        if self._refuse:
            slots, generations, reasons = zip(*self._refuse, strict=True)
            responses.append(
                draft_pb2.LinkResponse(
                    refuse=draft_pb2.Refuse(
                        target_boot_id=self._target_boot_id,
                        stream_epoch=self._stream_epoch,
                        slots=pack(slots, SLOT),
                        generations=pack(generations, GENERATION),
                        reasons=pack(reasons, REFUSE_REASON),
                    )
                )
            )
        return responses
