"""A chat answer in which functions may be called, in OpenAI's shape."""

from typing import Any

from gateway.openai_response import ChatShape
from gateway.tool_reader import Call, Content, Part, ToolReader, read


class ToolChatShape(ChatShape):
    """One answer's: it reads the calls out of the text as it comes."""

    def __init__(self, reader: ToolReader) -> None:
        self._reader = reader
        self._has_calls = False

    def whole(self, text: str) -> dict[str, Any]:
        texts = []
        calls: dict[int, dict[str, Any]] = {}
        for part in self._parts(text, is_last=True):
            if isinstance(part, Content):
                texts.append(part.text)
            elif isinstance(part, Call):
                calls[part.index] = _call_object(part)
            else:
                calls[part.index]["function"]["arguments"] += part.text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": "".join(texts) or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = list(calls.values())
        return {"message": message}

    def piece(self, text: str, token_ids: list[int] | None, *, is_last: bool) -> dict[str, Any]:
        texts = []
        calls: list[dict[str, Any]] = []
        for part in self._parts(text, is_last=is_last):
            if isinstance(part, Content):
                texts.append(part.text)
            elif isinstance(part, Call):
                calls.append({"index": part.index, **_call_object(part)})
            else:
                calls.append({"index": part.index, "function": {"arguments": part.text}})
        answer = super().piece("".join(texts), token_ids, is_last=is_last)
        if calls:
            answer["delta"]["tool_calls"] = calls
        return answer

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self._has_calls and reason == "stop" else reason

    def _parts(self, text: str, *, is_last: bool) -> list[Part]:
        parts = read(self._reader, text, is_last=is_last)
        self._has_calls |= any(isinstance(part, Call) for part in parts)
        return parts


def _call_object(call: Call) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
