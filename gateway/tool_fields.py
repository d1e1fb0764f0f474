"""OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`, checked field by field."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from gateway.fields import Fields, as_list
from outrider.serving.errors import InvalidArgument

MAX_TOOLS: Final = 128
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Mode = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function that the model may ask for. `definition` is as the client wrote it, for templates;
    `parameters` is the JSON schema of its arguments.
    """

    name: str
    parameters: Mapping[str, Any]
    is_strict: bool  # its arguments keep to the schema, also where the model decides to call
    definition: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """The functions of a request and whether to call one. `named` has the one tool of that name."""

    tools: tuple[Tool, ...]
    mode: Mode
    is_parallel: bool  # more than one call in an answer is fine


def tool_request(fields: Fields) -> ToolRequest | None:
    """Reads the fields; None where no function may be called. Raises InvalidArgument."""
    tools = _tools(fields.take("tools"))
    choice = fields.take("tool_choice")
    parallel = fields.take("parallel_tool_calls")
    if not (parallel is None or isinstance(parallel, bool)):
        raise InvalidArgument("parallel_tool_calls", parallel, "true or false")
    mode, name = _choice(choice, tools)
    if not tools or mode == "none":
        return None
    if mode == "named":
        tools = tuple(tool for tool in tools if tool.name == name)
    return ToolRequest(tools=tools, mode=mode, is_parallel=parallel is not False)


def _tools(value: object) -> tuple[Tool, ...]:
    tools = []
    names = set()
    for index, one in enumerate(as_list("tools", value, at_most=MAX_TOOLS)):
        tool = _tool(one, f"tools[{index}]")
        if tool.name in names:
            raise InvalidArgument(f"tools[{index}].function.name", tool.name, "in one tool only")
        names.add(tool.name)
        tools.append(tool)
    return tuple(tools)


def _tool(value: object, where: str) -> Tool:
    fields = Fields(value, where)
    kind = fields.take("type")
    if kind != "function":
        raise InvalidArgument(f"{where}.type", kind, "'function': nothing else is implemented")
    definition = fields.take("function")
    fields.refuse_unknown()
    inner = Fields(definition, f"{where}.function")
    name = inner.text("name")
    if name is None or not _NAME.fullmatch(name):
        bound = "1 to 64 of the characters A-Z, a-z, 0-9, _, . and -"
        raise InvalidArgument(f"{where}.function.name", name, bound)
    inner.text("description")
    is_strict = inner.boolean("strict")
    parameters = inner.take("parameters")
    inner.refuse_unknown()
    if parameters is None:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"{where}.function.parameters", parameters, "a JSON schema")
    _check_unicode(f"{where}.function", definition)
    assert isinstance(definition, dict)
    return Tool(
        name=name,
        parameters=parameters,
        is_strict=is_strict,
        definition={"type": "function", "function": definition},
    )


def _check_unicode(field: str, value: object) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, value, "text without lone surrogates") from error


def _choice(value: object, tools: tuple[Tool, ...]) -> tuple[Mode, str | None]:
    if value is None or value == "auto":
        return "auto", None
    if value == "none":
        return "none", None
    if value == "required":
        if not tools:
            raise InvalidArgument("tool_choice", value, "none or auto without tools")
        return "required", None
    if not isinstance(value, dict):
        raise InvalidArgument("tool_choice", value, "none, auto, required or a function")
    fields = Fields(value, "tool_choice")
    kind = fields.take("type")
    if kind != "function":
        raise InvalidArgument("tool_choice.type", kind, "'function'")
    inner = Fields(fields.take("function"), "tool_choice.function")
    fields.refuse_unknown()
    name = inner.text("name")
    inner.refuse_unknown()
    names = [tool.name for tool in tools]
    if name is None or name not in names:
        bound = f"one of the tools: {', '.join(names) or 'there are none'}"
        raise InvalidArgument("tool_choice.function.name", name, bound)
    return "named", name
