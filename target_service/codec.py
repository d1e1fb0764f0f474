"""Link messages of the target's side: rows into columns, and a Draft's columns into rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from outrider.engine.feature_store import Rows
from outrider.engine.sampling import Sampling
from outrider.serving.columns import MalformedColumn, pack, split, unpack
from outrider.serving.link_protocol import (
    BASE_LENGTH,
    CASE_ACCEPTED_LENGTH,
    COMMIT_COUNT,
    DRAFT_LENGTH,
    FEATURE_COUNT,
    FEATURE_FIRST_POSITION,
    GENERATION,
    PARENT,
    PREFIX_CASE_COMMITTED,
    PREFIX_HASH,
    SHARED_MEMORY_OFFSET,
    SLOT,
    TOKEN_COUNT,
    TOKEN_ID,
)
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2, sampling_pb2

# Link messages by direction, as counted; a Pong is a ping on its way back.
SENT_KINDS = ("hello", "open", "step", "close", "ping")
RECEIVED_KINDS = {
    "hello": "hello",
    "draft": "draft",
    "resync": "resync",
    "refuse": "refuse",
    "pong": "ping",
    "go_away": "go_away",
    "feature_projection": "feature_projection",
}

# Why a draft row is not used: it is late or of another state of its sequence ...
LATE = "late"
EPOCH = "epoch"
SLOT_FREE = "slot"
OTHER_GENERATION = "generation"
OTHER_BASE_LENGTH = "base_length"
NOT_ASKED = "not_asked"
# The draft service said that it will not serve the sequence.
REFUSED = "refused"
# ... or no state of the target would have made it right.
MALFORMED = "malformed"
TOKEN_RANGE = "token_range"
OTHER_PREFIX_HASH = "prefix_hash"
TOO_LONG = "draft_length"
DROP_REASONS = (
    LATE, EPOCH, SLOT_FREE, OTHER_GENERATION, OTHER_BASE_LENGTH, NOT_ASKED, REFUSED,
    MALFORMED, TOKEN_RANGE, OTHER_PREFIX_HASH, TOO_LONG,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """Which sequence, in which state. On the link every row carries it."""

    slot: int
    generation: int
    base_length: int
    prefix_hash: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRows:
    """Features of consecutive positions."""

    first_position: int
    rows: Rows  # at least one


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One sequence of a Step: its latest commits, features of committed tokens, and what is asked
    for.
    """

    stamp: Stamp
    committed_token_ids: Sequence[int]
    draft_length: int
    features: FeatureRows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRow:
    """One draft as it came: nothing about it is checked."""

    stamp: Stamp
    token_ids: tuple[int, ...]


def encode_open(stamp: Stamp, token_ids: Sequence[int], sampling: Sampling) -> draft_pb2.Open:
    """A sequence with everything committed."""
    return draft_pb2.Open(
        slot=stamp.slot,
        generation=stamp.generation,
        token_ids=pack(token_ids, TOKEN_ID),
        prefix_hash=stamp.prefix_hash,
        sampling=sampling_pb2.SamplingParameters(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            seed=sampling.seed,
        ),
    )


def encode_step(
    *,
    target_boot_id: int,
    stream_epoch: int,
    step_id: int,
    deadline_us: int,
    rows: Sequence[StepRow],
    ring: SharedRing | None = None,
) -> draft_pb2.Step:
    """A step's rows. Their features, if any, go into the ring, or into the message without one."""
    step = draft_pb2.Step(
        target_boot_id=target_boot_id,
        stream_epoch=stream_epoch,
        step_id=step_id,
        deadline_us=deadline_us,
        slots=pack([row.stamp.slot for row in rows], SLOT),
        generations=pack([row.stamp.generation for row in rows], GENERATION),
        base_lengths=pack([row.stamp.base_length for row in rows], BASE_LENGTH),
        prefix_hashes=pack([row.stamp.prefix_hash for row in rows], PREFIX_HASH),
        commit_counts=pack([len(row.committed_token_ids) for row in rows], COMMIT_COUNT),
        commit_token_ids=pack(
            [token_id for row in rows for token_id in row.committed_token_ids], TOKEN_ID
        ),
        draft_lengths=pack([row.draft_length for row in rows], DRAFT_LENGTH),
    )
    features = [row.features for row in rows]
    if any(features):
        _add_features(step, features, ring)
    return step


def _add_features(
    step: draft_pb2.Step, features: Sequence[FeatureRows | None], ring: SharedRing | None
) -> None:
    step.feature_first_positions = pack(
        [0 if row is None else row.first_position for row in features], FEATURE_FIRST_POSITION
    )
    step.feature_counts = pack(
        [0 if row is None else len(row.rows) for row in features], FEATURE_COUNT
    )
    contents = [
        b"" if row is None else row.rows.astype("<u2", copy=False).tobytes() for row in features
    ]
    if ring is None:
        step.inline_features = b"".join(contents)
    else:
        step.shared_memory_offsets = pack(
            [ring.write(content) if content else 0 for content in contents], SHARED_MEMORY_OFFSET
        )


def split_steps(rows: Sequence[StepRow], max_feature_rows: int) -> list[list[StepRow]]:
    """The rows as Steps of at most so many rows of features each; drafts are asked for in the last.

    A row is cut where a Step is full: its commits go with its first piece.
    """
    counts = [0 if row.features is None else len(row.features.rows) for row in rows]
    if sum(counts) <= max_feature_rows:
        return [list(rows)]
    steps: list[list[StepRow]] = [[]]
    room = max_feature_rows
    for row, count in zip(rows, counts, strict=True):
        rest = row
        while count > room:
            if room:
                piece, rest = _cut(rest, room)
                steps[-1].append(piece)
            count -= room
            steps.append([])
            room = max_feature_rows
        steps[-1].append(rest)
        room -= count
    asking = []
    for step in steps[:-1]:
        for index, row in enumerate(step):
            if row.draft_length:
                asking.append(replace(row, committed_token_ids=(), features=None))
                step[index] = replace(row, draft_length=0)
    return [*steps[:-1], [*asking, *steps[-1]]]


def _cut(row: StepRow, count: int) -> tuple[StepRow, StepRow]:
    """The row with its first `count` features, and what is left of it."""
    features = row.features
    assert features is not None
    head = FeatureRows(first_position=features.first_position, rows=features.rows[:count])
    tail = FeatureRows(first_position=features.first_position + count, rows=features.rows[count:])
    return (
        replace(row, features=head, draft_length=0),
        replace(row, features=tail, committed_token_ids=()),
    )


def encode_close(
    *, target_boot_id: int, stream_epoch: int, rows: Iterable[tuple[int, int]]
) -> draft_pb2.CloseBatch:
    """Ended sequences as (slot, generation)."""
    rows = list(rows)
    return draft_pb2.CloseBatch(
        target_boot_id=target_boot_id,
        stream_epoch=stream_epoch,
        slots=pack([slot for slot, _ in rows], SLOT),
        generations=pack([generation for _, generation in rows], GENERATION),
    )


def decode_draft(message: draft_pb2.Draft, max_rows: int) -> list[DraftRow]:
    """The rows of a Draft. Raises MalformedColumn if its columns cannot be told apart, or hold more
    than `max_rows` rows.

    Rows for a case other than the committed prefix, and drafts that are not chains, are left out:
    this target asks for neither.
    """
    slots = _slots(message.slots, max_rows)
    count = len(slots)
    generations = unpack("generations", message.generations, GENERATION, count)
    base_lengths = unpack("base_lengths", message.base_lengths, BASE_LENGTH, count)
    prefix_hashes = unpack("prefix_hashes", message.prefix_hashes, PREFIX_HASH, count)
    token_counts = unpack("token_counts", message.token_counts, TOKEN_COUNT, count)
    # The length first: what is longer than the counts say is not worth unpacking.
    token_ids = unpack("token_ids", message.token_ids, TOKEN_ID, sum(token_counts))
    tokens = split("token_ids", token_ids, token_counts)
    row_parents: list[Sequence[int]] = (
        split("parents", unpack("parents", message.parents, PARENT, len(token_ids)), token_counts)
        if message.parents
        else [()] * count
    )
    cases = (
        unpack("case_accepted_lengths", message.case_accepted_lengths, CASE_ACCEPTED_LENGTH, count)
        if message.case_accepted_lengths
        else [PREFIX_CASE_COMMITTED] * count
    )
    return [
        DraftRow(
            stamp=Stamp(
                slot=slots[index],
                generation=generations[index],
                base_length=base_lengths[index],
                prefix_hash=prefix_hashes[index],
            ),
            token_ids=tuple(tokens[index]),
        )
        for index in range(count)
        if _is_chain(row_parents[index]) and cases[index] == PREFIX_CASE_COMMITTED
    ]


def decode_rows(
    message: draft_pb2.Resync | draft_pb2.Refuse, max_rows: int
) -> list[tuple[int, int]]:
    """(slot, generation) of a Resync or Refuse of at most `max_rows`. Raises MalformedColumn."""
    slots = _slots(message.slots, max_rows)
    return list(
        zip(slots, unpack("generations", message.generations, GENERATION, len(slots)), strict=True)
    )


def _slots(column: bytes, max_rows: int) -> list[int]:
    if len(column) > max_rows * np.dtype(SLOT).itemsize:
        raise MalformedColumn(f"slots has {len(column)} bytes, must hold at most {max_rows} rows")
    return unpack("slots", column, SLOT)


def _is_chain(parents: Sequence[int]) -> bool:
    return all(parent == index - 1 for index, parent in enumerate(parents))
