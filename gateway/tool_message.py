"""The edge: functions and their calls between gRPC messages and the gateway's inside."""

from collections.abc import Iterable
from typing import Any

from gateway.fields import Fields
from gateway.tool_fields import ToolRequest, tool_request
from gateway.tool_reader import Call, Content, Part
from outrider.serving.errors import InvalidArgument
from outrider.serving.json_text import json_value
from outrider.v1 import generation_pb2


def chat_messages_from(chat: generation_pb2.ChatMessages) -> list[dict[str, Any]]:
    """A conversation as REST has it."""
    return [_chat_message(message) for message in chat.messages]


def tool_request_from(chat: generation_pb2.ChatMessages) -> ToolRequest | None:
    """The functions of a request; None where none may be called. Raises InvalidArgument, with the
    names that REST has.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(chat.tools)]
    choice = chat.tool_choice.WhichOneof("choice")
    given: object = choice
    if choice == "function":
        given = {"type": "function", "function": {"name": chat.tool_choice.function}}
    elif choice is not None and getattr(chat.tool_choice, choice) is not True:
        raise InvalidArgument(f"tool_choice.{choice}", False, "true")
    fields = {
        "tools": tools,
        "tool_choice": given,
        "parallel_tool_calls": not chat.single_tool_call,
    }
    return tool_request(Fields(fields))


def response_parts(parts: Iterable[Part]) -> tuple[str, list[generation_pb2.ToolCallPiece]]:
    """What a piece of an answer says to the user, and what of calls."""
    texts = []
    pieces = []
    for part in parts:
        if isinstance(part, Content):
            texts.append(part.text)
        elif isinstance(part, Call):
            pieces.append(
                generation_pb2.ToolCallPiece(
                    index=part.index, id=part.call_id, name=part.name, arguments=part.arguments
                )
            )
        else:
            pieces.append(generation_pb2.ToolCallPiece(index=part.index, arguments=part.text))
    return "".join(texts), pieces


def _chat_message(message: generation_pb2.ChatMessage) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_call_id:
        shown["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return shown


def _tool(tool: generation_pb2.Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    if tool.strict:
        function["strict"] = True
    if tool.HasField("parameters"):
        function["parameters"] = json_value(f"{where}.function.parameters", tool.parameters)
    return {"type": "function", "function": function}
