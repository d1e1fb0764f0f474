"""What the text of an answer must look like, as a checked value: the edge between protobuf or JSON
and the services' inside. Knows no tokens; whether a grammar can be compiled is its compiler's word.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.serving.errors import InvalidArgument
from outrider.serving.json_text import json_value
from outrider.v1 import structured_output_pb2

# Bounds what compiling can take: its time, and the depth of its recursion.
MAX_CHARACTERS = 65_536
MAX_CHOICES = 1024

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """One constraint. `text` is a JSON schema as JSON, a regular expression or a Lark grammar;
    `choices` are texts. Equal ones have the same grammar.
    """

    kind: Kind
    text: str = ""
    choices: tuple[str, ...] = ()

    def to_message(self) -> structured_output_pb2.StructuredOutput:
        """The constraint as the services pass it on."""
        message = structured_output_pb2.StructuredOutput()
        if self.kind == "json_object":
            message.json_object = True
        elif self.kind == "choice":
            message.choice.texts.extend(self.choices)
        else:
            setattr(message, self.kind, self.text)
        return message


JSON_OBJECT = StructuredOutput(kind="json_object")


def json_schema(field: str, schema: Mapping[str, Any]) -> StructuredOutput:
    """One JSON text that the schema describes, its properties in the schema's order."""
    text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    return StructuredOutput(kind="json_schema", text=_bounded(field, text))


def regex(field: str, pattern: str) -> StructuredOutput:
    """Texts that the whole pattern matches."""
    return StructuredOutput(kind="regex", text=_bounded(field, pattern))


def grammar(field: str, text: str) -> StructuredOutput:
    """Texts of a Lark grammar."""
    return StructuredOutput(kind="grammar", text=_bounded(field, text))


def choice(field: str, texts: Sequence[str]) -> StructuredOutput:
    """One of these texts."""
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidArgument(field, f"a list of {len(texts)}", f"1 to {MAX_CHOICES} texts")
    for index, text in enumerate(texts):
        _bounded(f"{field}[{index}]", text)
    num_characters = sum(map(len, texts))
    if num_characters > MAX_CHARACTERS:
        raise InvalidArgument(field, f"{num_characters} characters", f"at most {MAX_CHARACTERS}")
    return StructuredOutput(kind="choice", choices=tuple(texts))


def structured_output_from(
    field: str, message: structured_output_pb2.StructuredOutput
) -> StructuredOutput:
    """Checks a message. Raises InvalidArgument naming field, value and bound."""
    kind = message.WhichOneof("constraint")
    if kind == "json_schema":
        return json_schema(f"{field}.json_schema", _schema(f"{field}.json_schema", message))
    if kind == "regex":
        return regex(f"{field}.regex", message.regex)
    if kind == "grammar":
        return grammar(f"{field}.grammar", message.grammar)
    if kind == "choice":
        return choice(f"{field}.choice", list(message.choice.texts))
    if kind == "json_object" and message.json_object:
        return JSON_OBJECT
    raise InvalidArgument(field, None, "json_schema, json_object (true), regex, choice or grammar")


def _schema(field: str, message: structured_output_pb2.StructuredOutput) -> Mapping[str, Any]:
    text = _bounded(field, message.json_schema)
    schema = json_value(field, text)
    if not isinstance(schema, dict):
        raise InvalidArgument(field, text, "a JSON object")
    return schema


def _bounded(field: str, text: str) -> str:
    if not text:
        raise InvalidArgument(field, text, "at least one character")
    if len(text) > MAX_CHARACTERS:
        raise InvalidArgument(field, f"{len(text)} characters", f"at most {MAX_CHARACTERS}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, text, "text without lone surrogates") from error
    return text
