"""What an answer must look like so that it is a call of one of some functions."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.request import RequestedOutput
from gateway.tool_fields import Tool
from gateway.tool_format import ToolFormat
from outrider.serving.grammar_compiler import JSON_OPTIONS
from outrider.serving.special_tokens import SpecialTokens
from outrider.serving.structured_output import grammar, json_schema


def arguments_output(tool: Tool) -> RequestedOutput:
    """The arguments of one function and nothing else."""
    return RequestedOutput(field="tools", output=json_schema("tools", tool.parameters))


def calls_output(
    tools: Sequence[Tool], tool_format: ToolFormat, special: SpecialTokens, *, is_parallel: bool
) -> RequestedOutput:
    """Calls in a format: one, or one after another where the format tells where one ends."""
    call = _call_schema(tools, tool_format, is_parallel=is_parallel)
    if not tool_format.opening:
        return RequestedOutput(field="tools", output=json_schema("tools", call))
    repeats = is_parallel and not tool_format.is_list
    return _grammar(
        "start: call" + (r' ("\n" call)*' if repeats else ""),
        f"call: {_mark(tool_format.opening, special)} rest",
        *_rest(call, tool_format, special),
    )


def text_or_calls_output(
    tools: Sequence[Tool], tool_format: ToolFormat, special: SpecialTokens, *, is_parallel: bool
) -> RequestedOutput:
    """Any text, but a call that is begun keeps to the format and its function's parameters."""
    call = _call_schema(tools, tool_format, is_parallel=is_parallel)
    if not tool_format.opening:
        return _grammar(
            "start: TEXT | call", r"TEXT: /[ \t\n]*[^ \t\n{](.|\n)*/", f"call: {_json(call)}"
        )
    repeats = is_parallel and not tool_format.is_list
    opening = _mark(tool_format.opening, special)
    begun = ["call: TEXT " + opening + " rest"]
    if not opening.startswith("<"):
        # Lazy: the first time that the text ends like this, it is a call.
        begun = ["call: begun rest", f"begun[lazy]: TEXT {opening}"]
    return _grammar(
        "start: call* text" if repeats else "start: call | text",
        "text: TEXT",
        r"TEXT: /(.|\n)*/",
        *begun,
        *_rest(call, tool_format, special),
    )


def _rest(call: Mapping[str, Any], tool_format: ToolFormat, special: SpecialTokens) -> list[str]:
    """What follows an opening."""
    space = "" if tool_format.is_list else r'"\n" '
    closing = f" {space}{_mark(tool_format.closing, special)}" if tool_format.closing else ""
    return [f"rest: {space}arguments{closing}", f"arguments: {_json(call)}"]


def _grammar(*lines: str) -> RequestedOutput:
    return RequestedOutput(field="tools", output=grammar("tools", "\n".join(lines)))


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS}, ensure_ascii=False)


def _mark(text: str, special: SpecialTokens) -> str:
    """A text in a grammar; a special token where it is one."""
    token_id = special.ids_by_text.get(text)
    return json.dumps(text) if token_id is None else f"<[{token_id}]>"


def _call_schema(
    tools: Sequence[Tool], tool_format: ToolFormat, *, is_parallel: bool
) -> dict[str, Any]:
    """An object with a function's name and its arguments, or the format's list of them."""
    calls = []
    definitions = {}
    for index, tool in enumerate(tools):
        name = f"function{index}"
        definitions[name] = _moved(tool.parameters, f"#/$defs/{name}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.name},
                    tool_format.arguments_key: {"$ref": f"#/$defs/{name}"},
                },
                "required": ["name", tool_format.arguments_key],
                "additionalProperties": False,
            }
        )
    if not tool_format.is_list:
        return {"anyOf": calls, "$defs": definitions}
    limit = {} if is_parallel else {"maxItems": 1}
    items = {"anyOf": calls}
    return {"type": "array", "items": items, "minItems": 1, **limit, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at `place` in another one: its own references lead there too."""
    if isinstance(schema, Mapping):
        return {
            key: place + value.removeprefix("#")
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    return schema
