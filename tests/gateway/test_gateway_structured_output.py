"""Structured output as clients ask for it: checked by field, compiled before the target hears of
it, and never in the way of others.
"""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc, structured_output_pb2

MODEL = "smollm2-135m-instruct"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def chat(**fields):
    messages = [{"role": "user", "content": "Hi"}]
    return {"model": MODEL, "messages": messages, "max_tokens": 2, **fields}


def schema_format(**fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", **fields}}


ACCEPTED = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": schema_format()}, {"json_object": True}),
    (
        {"response_format": schema_format(schema=SCHEMA, strict=True, description="What to say")},
        {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
    ),
    (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None}},
        {"json_schema": json.dumps(SCHEMA, separators=(",", ":"))},
    ),
    ({"structured_outputs": {"regex": "a|b"}}, {"regex": "a|b"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": {"texts": ["a", "b"]}}),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
]


@pytest.mark.parametrize(("fields", "expected"), ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_is_asked_for_reaches_the_target(ready, fields, expected):
    for path, body in (
        (CHAT, chat(**fields)),
        (TEXT, {"model": MODEL, "prompt": "Hi", "max_tokens": 2, **fields}),
    ):
        response = ready.client.post(path, json=body)
        assert response.status_code == 200, response.text
        (admitted,) = ready.model.admitted[-1].sequences
        if expected is None:
            assert not admitted.HasField("structured_output")
        else:
            assert admitted.structured_output == structured_output_pb2.StructuredOutput(**expected)


REFUSED = [
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "mood": 1}}, "response_format.mood"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
    ),
    ({"response_format": schema_format(schema=[])}, "response_format.json_schema.schema"),
    ({"response_format": schema_format(strict="yes")}, "response_format.json_schema.strict"),
    ({"response_format": schema_format(extra=1)}, "response_format.json_schema.extra"),
    (
        {"response_format": schema_format(schema={"type": "frob"})},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": schema_format(schema={"type": "array", "uniqueItems": True})},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": schema_format(schema={
            "type": "object",
            "properties": {f"p{index}": {"type": "string"} for index in range(1500)},
        })},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": schema_format(schema={"title": "x" * 70_000})},
        "response_format.json_schema.schema",
    ),
    ({"response_format": schema_format(), "ignore_eos": True}, "ignore_eos"),
    ({"response_format": schema_format(), "min_tokens": 2}, "min_tokens"),
    (
        {"response_format": schema_format(), "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 7]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"grammar": "start: foo"}}, "structured_outputs.grammar"),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_json": SCHEMA}, "guided_json"),
    ({"guided_choice": ["a"]}, "guided_choice"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field"), REFUSED, ids=[field for _, field in REFUSED])
def test_what_cannot_be_is_a_400_naming_field_and_reason(ready, fields, field):
    num_admitted = len(ready.model.admitted)
    response = ready.client.post(CHAT, json=chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field and error["message"].startswith(f"{field} is ")
    assert "must be" in error["message"]
    assert len(ready.model.admitted) == num_admitted


@pytest.fixture(scope="module")
def stub(ready):
    with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def test_over_grpc_it_is_typed_and_means_the_same(ready, stub):
    wanted = structured_output_pb2.StructuredOutput(regex="a|b")
    request = generation_pb2.GenerateRequest(prompt="Hi", max_tokens=2, structured_output=wanted)
    list(stub.Generate(request, timeout=20))
    assert ready.model.admitted[-1].sequences[0].structured_output == wanted
    for bad, words in (
        ({"regex": "(a"}, "structured_output.regex|structured_output is"),
        ({}, "structured_output is None"),
        ({"json_schema": '{"type": "frob"}'}, "frob"),
        ({"choice": {"texts": [""]}}, r"structured_output.choice\[0\]"),
    ):
        request.structured_output.CopyFrom(structured_output_pb2.StructuredOutput(**bad))
        with pytest.raises(grpc.RpcError, match=words) as error_info:
            list(stub.Generate(request, timeout=20))
        assert error_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    request.structured_output.CopyFrom(wanted)
    request.ignore_eos = True
    with pytest.raises(grpc.RpcError, match="ignore_eos"):
        list(stub.Generate(request, timeout=20))


def test_a_costly_schema_stalls_nobody_else(ready):
    """Each takes a few tenths of a second to be refused; others are answered meanwhile."""

    def costly(index: int) -> float:
        properties = {f"p{index}_{number}": {"type": "string"} for number in range(1200)}
        schema = {"type": "object", "properties": properties}
        started = time.monotonic()
        response = ready.client.post(CHAT, json=chat(response_format=schema_format(schema=schema)))
        assert response.status_code == 400
        return time.monotonic() - started

    with ThreadPoolExecutor(6) as pool:
        compiling = [pool.submit(costly, index) for index in range(6)]
        longest = 0.0
        num_answered = 0
        while not all(future.done() for future in compiling):
            started = time.monotonic()
            assert ready.client.post(CHAT, json=chat()).status_code == 200
            longest = max(longest, time.monotonic() - started)
            num_answered += 1
        slowest = max(future.result() for future in compiling)
    assert num_answered > 5
    assert longest < slowest / 2
