"""How a model writes down that a function shall be called: the formats that are known, told by the
model's own chat template.
"""

from dataclasses import dataclass
from typing import Any, Final

from gateway.chat_template import ChatTemplate, ChatTemplateError
from outrider.serving.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """JSON objects with `name` and the arguments, or a list of them, between `opening` and
    `closing`; without an opening the answer is nothing else, without a closing it ends with them.
    """

    name: str
    opening: str
    closing: str
    arguments_key: str
    is_list: bool
    id_characters: int


HERMES: Final = ToolFormat(
    name="hermes", opening="<tool_call>", closing="</tool_call>", arguments_key="arguments",
    is_list=False, id_characters=24,
)  # fmt: skip
MISTRAL: Final = ToolFormat(
    # Its template takes ids of nine letters and digits only.
    name="mistral", opening="[TOOL_CALLS]", closing="", arguments_key="arguments", is_list=True,
    id_characters=9,
)  # fmt: skip
LLAMA: Final = ToolFormat(
    name="llama3_json", opening="", closing="", arguments_key="parameters", is_list=False,
    id_characters=24,
)  # fmt: skip
# For models without a format of their own: only where a call is asked for.
PLAIN: Final = ToolFormat(
    name="json", opening="", closing="", arguments_key="arguments", is_list=False, id_characters=24
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSupport:
    """What a chat template shows the model. `format` is None where it is not known how the model
    calls.
    """

    shows_tools: bool
    shows_calls: bool
    format: ToolFormat | None


_PROBE: Final = "probed_function"
_QUESTION: Final = {"role": "user", "content": "?"}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "?",
        "parameters": {"type": "object", "properties": {}},
    },
}
_CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE}}


def tool_support(template: ChatTemplate | None, source: str) -> ToolSupport:
    """Looks at a template and tries it; a model without one is shown nothing."""
    if template is None:
        return ToolSupport(shows_tools=False, shows_calls=False, format=None)
    shows_tools = _shows(template, [_QUESTION], [_TOOL])
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "content": "?", "tool_call_id": _CALL["id"], "name": _PROBE}
    return ToolSupport(
        shows_tools=shows_tools,
        shows_calls=_shows(template, [_QUESTION, answer, result], None),
        format=_format(source) if shows_tools else None,
    )


def _shows(
    template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> bool:
    try:
        return _PROBE in template.render(messages, tools=tools).text
    except (ChatTemplateError, InvalidArgument):
        return False


def _format(source: str) -> ToolFormat | None:
    if "<tool_call>" in source and "<function=" not in source:
        return HERMES
    if "[TOOL_CALLS]" in source and "[ARGS]" not in source:
        return MISTRAL
    if '{"name": function name, "parameters":' in source:
        return LLAMA
    return None
