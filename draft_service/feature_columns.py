"""Features in messages: the rows themselves, from the message or from the link's shared memory.

Nothing here makes more bytes than the message or the shared memory holds.
"""

from itertools import accumulate
from typing import NamedTuple

from draft_service.drafters.drafter import FeatureRows
from outrider.serving.columns import MalformedColumn, unpack
from outrider.serving.link_protocol import (
    FEATURE_COUNT,
    FEATURE_FIRST_POSITION,
    SHARED_MEMORY_OFFSET,
)
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2


class SentFeatures(NamedTuple):
    """What came of one row's features."""

    rows: FeatureRows | None
    # Sent, but no longer in the shared memory, or not yet.
    are_lost: bool


NO_FEATURES = SentFeatures(None, are_lost=False)


def features_of_step(
    step: draft_pb2.Step, num_rows: int, *, row_bytes: int, ring: SharedRing | None
) -> list[SentFeatures]:
    """Each row's. Raises MalformedColumn where one could be taken for another's."""
    inline, offset_column = step.inline_features, step.shared_memory_offsets
    if not (step.feature_counts or step.feature_first_positions or inline or offset_column):
        return [NO_FEATURES] * num_rows
    counts = unpack("feature_counts", step.feature_counts, FEATURE_COUNT, num_rows)
    positions = unpack(
        "feature_first_positions", step.feature_first_positions, FEATURE_FIRST_POSITION, num_rows
    )
    size = sum(counts) * row_bytes
    if offset_column:
        offsets = unpack("shared_memory_offsets", offset_column, SHARED_MEMORY_OFFSET, num_rows)
        _check_shared("feature_counts", size, inline, ring)
        return [
            _read(position, offset, count * row_bytes, ring) if count else NO_FEATURES
            for position, offset, count in zip(positions, offsets, counts, strict=True)
        ]
    if size != len(inline):
        raise MalformedColumn(
            f"inline_features has {len(inline)} bytes, feature_counts add up to {size}"
        )
    ends = accumulate(count * row_bytes for count in counts)
    return [
        SentFeatures(
            FeatureRows(first_position=position, rows=inline[end - count * row_bytes : end]),
            are_lost=False,
        )
        if count
        else NO_FEATURES
        for position, count, end in zip(positions, counts, ends, strict=True)
    ]


def features_of_open(
    features: draft_pb2.Features, *, row_bytes: int, ring: SharedRing | None
) -> SentFeatures:
    """An Open's. Raises MalformedColumn where its counts do not fit."""
    size = features.row_count * row_bytes
    if features.HasField("shared_memory_offset"):
        _check_shared("features.row_count", size, features.inline_rows, ring)
        if not size:
            return NO_FEATURES
        return _read(features.first_position, features.shared_memory_offset, size, ring)
    if size != len(features.inline_rows):
        raise MalformedColumn(
            f"features.inline_rows has {len(features.inline_rows)} bytes, must have {size}"
        )
    if not size:
        return NO_FEATURES
    rows = FeatureRows(first_position=features.first_position, rows=features.inline_rows)
    return SentFeatures(rows, are_lost=False)


def _check_shared(name: str, size: int, inline: bytes, ring: SharedRing | None) -> None:
    if ring is None:
        raise MalformedColumn("features lie in shared memory, and this link has none")
    if inline:
        raise MalformedColumn(f"features lie in shared memory, and {len(inline)} bytes inline")
    if size > ring.capacity:
        raise MalformedColumn(f"{name} add up to {size} bytes of a memory of {ring.capacity}")


def _read(position: int, offset: int, size: int, ring: SharedRing | None) -> SentFeatures:
    assert ring is not None
    data = ring.read(offset, size)
    if data is None:
        return SentFeatures(None, are_lost=True)
    return SentFeatures(FeatureRows(first_position=position, rows=data), are_lost=False)
