"""Chat messages as clients send them, turned into what chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from outrider.serving.errors import InvalidArgument

_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with text contents, for a template.

    Text parts are joined by a line feed, `developer` becomes `system`, the arguments of tool calls
    become objects where they are JSON text, and their results get names. Raises InvalidArgument.
    """
    if not messages:
        raise InvalidArgument("messages", messages, "at least one message")
    plain = [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    _name_results(plain)
    return plain


def _name_results(messages: Sequence[dict[str, Any]]) -> None:
    """Results of calls get their functions' names, which some templates want and clients leave
    out.
    """
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            if isinstance(call.get("id"), str):
                names[call["id"]] = call["function"]["name"]
        call_id = message.get("tool_call_id")
        if message["role"] == "tool" and "name" not in message and call_id in names:
            message["name"] = names[call_id]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidArgument(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    # Templates test whether a key is there, so what the client did not say must not be.
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if role == "developer" else role
    plain["content"] = _content(message, f"{where}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("role") == "assistant" and message.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        raise InvalidArgument(where, content, "a text or a list of text parts")
    return "\n".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise InvalidArgument(where, part, "an object with type and text")
    if part.get("type") != "text":
        raise InvalidArgument(f"{where}.type", part.get("type"), "'text'")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}.text", text, "a text")
    return text


def _tool_calls(tool_calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(tool_calls, list):
        raise InvalidArgument(where, tool_calls, "a list")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(tool_calls)]


def _tool_call(call: object, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidArgument(where, call, "an object with a function")
    if not isinstance(function.get("name"), str):
        raise InvalidArgument(f"{where}.function.name", function.get("name"), "a text")
    arguments = _arguments(function.get("arguments", {}), f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _arguments(arguments: object, where: str) -> Mapping[str, Any]:
    given = arguments
    if isinstance(arguments, str):
        try:
            given = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(where, arguments, f"JSON: {error}") from error
    if not isinstance(given, Mapping):
        raise InvalidArgument(where, arguments, "an object")
    return given
