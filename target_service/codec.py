"""Link messages of the target's side: rows into columns, and a Draft's columns into rows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.engine.sampling import Sampling
from outrider.serving.columns import MalformedColumn, pack, split, unpack
from outrider.serving.link_protocol import (
    BASE_LENGTH,
    CASE_ACCEPTED_LENGTH,
    COMMIT_COUNT,
    DRAFT_LENGTH,
    GENERATION,
    PARENT,
    PREFIX_CASE_COMMITTED,
    PREFIX_HASH,
    SLOT,
    TOKEN_COUNT,
    TOKEN_ID,
)
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
class StepRow:
    """One sequence of a Step: its latest commits and what is asked for."""

    stamp: Stamp
    committed_token_ids: Sequence[int]
    draft_length: int


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
) -> draft_pb2.Step:
    """One engine step's rows."""
    return draft_pb2.Step(
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
