"""How a request's functions are shown to the model, what its answer is held to, and how calls are
read out of it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.model import TextModel
from gateway.request import Options, RequestedOutput
from gateway.tool_fields import ToolRequest
from gateway.tool_format import PLAIN, ToolSupport
from gateway.tool_grammar import arguments_output, calls_output, text_or_calls_output
from gateway.tool_reader import FormatReader, NamedReader, ToolReader
from outrider.serving.errors import InvalidArgument


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalling:
    """One request's. `shown` goes to the chat template; without `output` the model decides."""

    shown: Sequence[Mapping[str, Any]] | None
    output: RequestedOutput | None
    # Special tokens mark calls: they have to be in the text that is read.
    reads_special: bool
    make_reader: Callable[[], ToolReader]


def tool_calling(request: ToolRequest, text_model: TextModel, options: Options) -> ToolCalling:
    """Raises InvalidArgument where the model cannot do what is asked for."""
    support = text_model.tool_support
    if options.structured_output is not None:
        raise InvalidArgument(
            options.structured_output.field, "set", "absent with tools, unless tool_choice is none"
        )
    shown = [tool.definition for tool in request.tools] if support.shows_tools else None
    if request.mode == "named":
        (tool,) = request.tools
        return ToolCalling(
            shown=shown,
            output=arguments_output(tool),
            reads_special=False,
            make_reader=lambda: NamedReader(tool.name),
        )
    if request.mode == "auto" and support.format is None:
        raise InvalidArgument(
            "tool_choice", "auto", f"none, required or a function: {_why(support)}"
        )
    tool_format = support.format or PLAIN
    special = text_model.vocabulary.special
    names = frozenset(tool.name for tool in request.tools)
    hold = None
    if request.mode == "required":
        hold = calls_output
    elif not request.is_parallel or any(tool.is_strict for tool in request.tools):
        hold = text_or_calls_output
    output = None
    if hold is not None:
        output = hold(request.tools, tool_format, special, is_parallel=request.is_parallel)
    return ToolCalling(
        shown=shown,
        output=output,
        reads_special=tool_format.opening in special.ids_by_text,
        make_reader=lambda: FormatReader(tool_format, names),
    )


def check_tool_calls(messages: Sequence[Mapping[str, Any]], support: ToolSupport) -> None:
    """Refuses calls in a conversation that the template would leave out."""
    if support.shows_calls:
        return
    for index, message in enumerate(messages):
        if message.get("tool_calls"):
            raise InvalidArgument(
                f"messages[{index}].tool_calls",
                message["tool_calls"],
                "absent: the model's chat template does not show calls",
            )


def _why(support: ToolSupport) -> str:
    if support.shows_tools:
        return "it is not known how this model writes its calls"
    return "the model's chat template does not show it the tools"
