"""Messages of the link with something wrong in them that a stamp or a hash must give away."""

from collections.abc import Callable

import numpy as np
from fake_engine import VOCAB_SIZE
from link_schedule import Field

from outrider.v1 import draft_pb2

Message = draft_pb2.LinkRequest | draft_pb2.LinkResponse
Change = Callable[["np.ndarray"], "np.ndarray"]

# By field: the column of a Step, a Draft or a Close, its type, and what becomes of it.
COLUMNS: dict[Field, tuple[str, str, Change]] = {
    Field.PLACE: ("slots", "<u4", lambda slots: np.roll(slots, 1)),
    Field.GENERATION: ("generations", "<u4", lambda generations: generations - 1),
    Field.BASE_LENGTH: ("base_lengths", "<u4", lambda lengths: lengths - 1),
    Field.PREFIX_HASH: ("prefix_hashes", "<u8", lambda hashes: hashes ^ np.uint64(1)),
}


def corrupted(message: Message, field: Field) -> Message:
    """A copy, changed where it has the field."""
    bent = type(message)()
    bent.CopyFrom(message)
    kind = bent.WhichOneof("kind")
    body = getattr(bent, kind)
    if field is Field.TOKEN:
        if kind == "step":
            body.commit_token_ids = _changed(body.commit_token_ids, "<i4", _other_last)
        elif kind == "open":
            first = body.sequences[0]
            first.token_ids = _changed(first.token_ids, "<i4", _other_last)
    elif field is Field.EPOCH:
        body.stream_epoch += 1
    elif field is Field.BOOT_ID:
        body.target_boot_id += 1
    else:
        name, dtype, change = COLUMNS[field]
        if name in body.DESCRIPTOR.fields_by_name:
            setattr(body, name, _changed(getattr(body, name), dtype, change))
    return bent


def _changed(column: bytes, dtype: str, change: Change) -> bytes:
    values = np.frombuffer(column, dtype)
    return change(values).astype(dtype).tobytes() if len(values) else column


def _other_last(tokens: np.ndarray) -> np.ndarray:
    tokens = tokens.copy()
    tokens[-1] = (tokens[-1] + 1) % VOCAB_SIZE
    return tokens
