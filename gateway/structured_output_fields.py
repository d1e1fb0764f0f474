"""What clients ask of the text of an answer: OpenAI's `response_format` and vLLM's
`structured_outputs`, checked field by field.
"""

from typing import Final

from gateway.fields import Fields, as_text
from gateway.request import RequestedOutput
from outrider.serving.errors import InvalidArgument
from outrider.serving.json_text import json_value
from outrider.serving.structured_output import JSON_OBJECT, choice, grammar, json_schema, regex

_CONSTRAINTS: Final = ("json", "regex", "choice", "grammar", "json_object")
# vLLM's former names, and what is there now.
_FORMER: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}


def requested_output(fields: Fields) -> RequestedOutput | None:
    """Reads the fields that constrain the text. Raises InvalidArgument naming field, value and
    bound.
    """
    for former, now in _FORMER.items():
        value = fields.take(former)
        if value is not None:
            raise InvalidArgument(former, value, f"absent: it is {now} now")
    by_format = _response_format(fields.take("response_format"))
    value = fields.take("structured_outputs")
    by_constraint = _structured_outputs(value)
    if by_format is not None and by_constraint is not None:
        raise InvalidArgument("structured_outputs", value, "absent beside response_format")
    return by_format or by_constraint


def _response_format(value: object) -> RequestedOutput | None:
    if value is None:
        return None
    fields = Fields(value, "response_format")
    kind = fields.take("type")
    requested = None
    if kind == "json_object":
        requested = RequestedOutput(field="response_format", output=JSON_OBJECT)
    elif kind == "json_schema":
        requested = _named_schema(fields.take("json_schema"))
    elif kind != "text":
        raise InvalidArgument("response_format.type", kind, "text, json_object or json_schema")
    fields.refuse_unknown()
    return requested


def _named_schema(value: object) -> RequestedOutput:
    where = "response_format.json_schema"
    fields = Fields(value, where)
    if fields.text("name") is None:
        raise InvalidArgument(f"{where}.name", None, "a text")
    fields.text("description")
    # The text keeps to the schema in either case.
    fields.boolean("strict")
    schema = fields.take("schema")
    fields.refuse_unknown()
    if schema is None:
        return RequestedOutput(field=where, output=JSON_OBJECT)
    return _schema(f"{where}.schema", schema)


def _structured_outputs(value: object) -> RequestedOutput | None:
    if value is None:
        return None
    where = "structured_outputs"
    fields = Fields(value, where)
    given = {name: fields.take(name) for name in _CONSTRAINTS}
    wanted = {name: one for name, one in given.items() if one is not None}
    fields.refuse_unknown()
    if len(wanted) != 1:
        raise InvalidArgument(where, sorted(wanted), f"with one of {', '.join(_CONSTRAINTS)}")
    ((name, one),) = wanted.items()
    field = f"{where}.{name}"
    if name == "json":
        return _schema(field, json_value(field, one) if isinstance(one, str) else one)
    if name == "regex":
        return RequestedOutput(field=field, output=regex(field, as_text(field, one)))
    if name == "grammar":
        return RequestedOutput(field=field, output=grammar(field, as_text(field, one)))
    if name == "choice":
        if not isinstance(one, list):
            raise InvalidArgument(field, one, "a list of texts")
        texts = [as_text(f"{field}[{index}]", text) for index, text in enumerate(one)]
        return RequestedOutput(field=field, output=choice(field, texts))
    if one is not True:
        raise InvalidArgument(field, one, "true")
    return RequestedOutput(field=field, output=JSON_OBJECT)


def _schema(field: str, schema: object) -> RequestedOutput:
    if not isinstance(schema, dict):
        raise InvalidArgument(field, schema, "a JSON object: a schema")
    return RequestedOutput(field=field, output=json_schema(field, schema))
