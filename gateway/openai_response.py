"""Answers in OpenAI's shapes, whole and in pieces.

A piece costs one small dictionary; what stays the same in a stream is made once.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.request import GenerationRequest
from gateway.sequence_text import Piece, Usage
from outrider.v1 import generation_pb2

_FINISH_REASONS = {
    0: None,
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    # OpenAI has no word for a deadline; the answer was cut.
    generation_pb2.FINISH_REASON_DEADLINE: "length",
}


# The piece of a chat whose text is held back.
_UNDECIDED: dict[str, Any] = {"delta": {}}


class Shape(Protocol):
    """What differs between chat and text completions."""

    prefix: str
    whole_object: str
    piece_object: str

    def whole(self, text: str) -> dict[str, Any]:
        """The part of a whole choice that holds the text."""

    def piece(self, text: str, token_ids: list[int] | None, *, is_last: bool) -> dict[str, Any]:
        """The part of a choice that holds a piece of the text."""

    def first_piece(self) -> dict[str, Any] | None:
        """What a stream begins with, if anything."""

    def finish_reason(self, reason: str | None) -> str | None:
        """What it is called here, once all text was given."""


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    piece_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def piece(self, text: str, token_ids: list[int] | None, *, is_last: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": text} if text else {}
        if token_ids is not None:
            delta["token_ids"] = token_ids
        return {"delta": delta}

    def first_piece(self) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


class TextShape:
    """`text_completion`."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    piece_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def piece(self, text: str, token_ids: list[int] | None, *, is_last: bool) -> dict[str, Any]:
        piece: dict[str, Any] = {"text": text}
        if token_ids is not None:
            piece["token_ids"] = token_ids
        return piece

    def first_piece(self) -> dict[str, Any] | None:
        return None

    def finish_reason(self, reason: str | None) -> str | None:
        return reason


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeChoice:
    """One answer that is complete."""

    text: str
    token_ids: list[int]
    finish_reason: int


class Answer:
    """The frame of one or several answers: id, model, time, fingerprint, and the seed that was
    used, from which those of further choices follow.
    """

    def __init__(
        self,
        shapes: Sequence[Shape],
        request: GenerationRequest,
        *,
        model: str,
        system_fingerprint: str,
    ) -> None:
        """`shapes`: one for each answer, since some keep what they have read."""
        self._shapes = shapes
        self._kind = shapes[0]
        self._frame = {
            "id": request.request_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": system_fingerprint,
            "seed": request.seed,
        }

    def whole(
        self, choices: Sequence[WholeChoice], usage: Usage, *, includes_token_ids: bool
    ) -> dict[str, Any]:
        """The body of answers that are not streamed."""
        objects = []
        for index, (shape, choice) in enumerate(zip(self._shapes, choices, strict=True)):
            part = shape.whole(choice.text)
            found = {
                "index": index,
                **part,
                "logprobs": None,
                "finish_reason": shape.finish_reason(_FINISH_REASONS[choice.finish_reason]),
            }
            if includes_token_ids:
                found["token_ids"] = choice.token_ids
            objects.append(found)
        return {
            **self._frame,
            "object": self._kind.whole_object,
            "choices": objects,
            "usage": usage_object(usage),
        }

    def first_pieces(self) -> list[dict[str, Any]]:
        """What a stream begins with, if anything."""
        parts = [(index, shape.first_piece()) for index, shape in enumerate(self._shapes)]
        return [self._chunk(index, part, None) for index, part in parts if part is not None]

    def piece(self, index: int, piece: Piece, *, includes_token_ids: bool) -> dict[str, Any] | None:
        """One event's body; None where a piece has nothing to say yet."""
        if not (piece.text or piece.finish_reason or includes_token_ids):
            return None
        shape = self._shapes[index]
        token_ids = piece.token_ids if includes_token_ids else None
        part = shape.piece(piece.text, token_ids, is_last=bool(piece.finish_reason))
        reason = shape.finish_reason(_FINISH_REASONS[piece.finish_reason])
        if reason is None and part == _UNDECIDED:
            return None
        return self._chunk(index, part, reason)

    def usage(self, usage: Usage) -> dict[str, Any]:
        """The event behind the last piece that `stream_options.include_usage` asks for."""
        return {
            **self._frame,
            "object": self._kind.piece_object,
            "choices": [],
            "usage": usage_object(usage),
        }

    def _chunk(self, index: int, part: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, **part, "logprobs": None, "finish_reason": finish_reason}
        return {**self._frame, "object": self._kind.piece_object, "choices": [choice]}


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with what speculation did."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_prompt_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_prediction_tokens,
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
            # Not OpenAI's: verifications of a non-empty draft, for the acceptance length.
            "drafts": usage.drafts,
        },
    }
