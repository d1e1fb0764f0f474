"""The messages of a conversation as OpenAI's clients send them, checked field by field.

What templates expect is another matter: see `chat_message`.
"""

from collections.abc import Mapping
from typing import Any

from gateway.fields import Fields, as_list, as_text
from outrider.serving.errors import InvalidArgument

MAX_TOOL_CALLS = 128

# Fields that are not implemented, with the values that ask for nothing.
_NEUTRAL_IN_MESSAGE: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("function_call", (), "absent"),
    ("audio", (), "absent"),
    ("refusal", (), "absent"),
    ("annotations", ([],), "empty"),
)
_ROLES = ("system", "developer", "user", "assistant", "tool")


def checked_messages(messages: object) -> list[Mapping[str, Any]]:
    """A conversation. Raises InvalidArgument naming field, value and bound."""
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", messages, "a list of at least one message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, where: str) -> Mapping[str, Any]:
    fields = Fields(message, where)
    role = fields.take("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidArgument(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    content = fields.take("content")
    tool_calls = _tool_calls(fields.take("tool_calls"), role, f"{where}.tool_calls")
    if isinstance(content, list) and content:
        checked: object = [
            _text_part(part, f"{where}.content[{index}]") for index, part in enumerate(content)
        ]
    elif isinstance(content, str):
        checked = as_text(f"{where}.content", content)
    elif content is None and tool_calls:
        checked = None
    else:
        raise InvalidArgument(f"{where}.content", content, "a text or a list of text parts")
    shown = {"role": role, "content": checked}
    if tool_calls:
        shown["tool_calls"] = tool_calls
    # Some templates show these; a template that does not, does not.
    for field in ("name", "tool_call_id"):
        text = fields.text(field)
        if text is not None:
            shown[field] = text
    for field, values, words in _NEUTRAL_IN_MESSAGE:
        fields.must_be_neutral(field, values, words)
    fields.refuse_unknown()
    return shown


def _tool_calls(value: object, role: str, where: str) -> list[Mapping[str, Any]]:
    """The calls of an assistant's message; their arguments are the template's business."""
    calls = as_list(where, value, at_most=MAX_TOOL_CALLS)
    if calls and role != "assistant":
        raise InvalidArgument(where, value, "absent but in an assistant's message")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(value: object, where: str) -> Mapping[str, Any]:
    fields = Fields(value, where)
    kind = fields.take("type")
    if kind not in (None, "function"):
        raise InvalidArgument(f"{where}.type", kind, "'function'")
    inner = Fields(fields.take("function"), f"{where}.function")
    shown = {
        "id": fields.text("id"),
        "type": "function",
        "function": {"name": inner.text("name"), "arguments": inner.text("arguments")},
    }
    fields.take("index")  # of a streamed answer
    fields.refuse_unknown()
    inner.refuse_unknown()
    for field, text in (("id", shown["id"]), ("function.name", inner.text("name"))):
        if text is None:
            raise InvalidArgument(f"{where}.{field}", None, "a text")
    return shown


def _text_part(part: object, where: str) -> Mapping[str, str]:
    fields = Fields(part, where)
    kind = fields.take("type")
    if kind != "text":
        raise InvalidArgument(f"{where}.type", kind, "'text': nothing else is implemented")
    text = as_text(f"{where}.text", fields.take("text"))
    fields.refuse_unknown()
    return {"type": "text", "text": text}
