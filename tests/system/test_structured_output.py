"""Structured output and tools in a real cluster, by the openai package and over plain HTTP."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pydantic
import pytest

from bench.cluster import Cluster, running_cluster

QUESTION = "Anna is 30 years old and likes chess. Describe her as JSON with name, age and hobbies."
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
    },
    "required": ["name", "age", "hobbies"],
    "additionalProperties": False,
}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {
    "name": "person", "schema": PERSON, "strict": True}}}  # fmt: skip
ADDRESS = r"(\d{1,3}\.){3}\d{1,3}"
REGEX = {"structured_outputs": {"regex": ADDRESS}}


def ask(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    """One choice."""
    messages = [{"role": "user", "content": QUESTION}]
    answer = cluster.complete(**{"messages": messages, "max_tokens": 60, "seed": 5, **fields})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


def check_person(choice: dict[str, Any]) -> bool:
    """Whether it is whole; valid it is in any case then."""
    if choice["finish_reason"] == "length":
        return False
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    return True


def test_drafts_change_no_token_of_a_schema_or_a_regex(ngram_cluster: Cluster) -> None:
    """All at once, at both temperatures; a draft service knows no grammar."""
    before = ngram_cluster.metrics()
    asked = [
        {**fields, "temperature": temperature}
        for fields in (SCHEMA, REGEX, {"response_format": {"type": "json_object"}})
        for temperature in (0.0, 1.0)
    ]

    def both(fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return (
            ask(ngram_cluster, **fields, speculation={"draft_length": 0}, max_tokens=45),
            ask(ngram_cluster, **fields, speculation={"draft_length": 5}, max_tokens=45),
        )

    with ThreadPoolExecutor(len(asked)) as pool:
        pairs = list(pool.map(both, asked))
    num_whole = 0
    for fields, (plain, drafted) in zip(asked, pairs, strict=True):
        assert plain["token_ids"] == drafted["token_ids"]
        assert plain["finish_reason"] == drafted["finish_reason"]
        if "structured_outputs" in fields:
            assert re.fullmatch(ADDRESS, plain["message"]["content"])
        elif fields["response_format"] is SCHEMA["response_format"]:
            num_whole += check_person(plain)
    assert num_whole
    after = ngram_cluster.metrics()
    for name in ("drafts", "accepted_tokens"):
        assert after[f"outrider_{name}_total"] > before[f"outrider_{name}_total"]


def test_a_costly_schema_is_refused_and_stalls_no_stream(ngram_cluster: Cluster) -> None:
    model = ngram_cluster.model
    url = f"{ngram_cluster.url}/v1"

    def costly(index: int) -> None:
        properties = {f"p{index}_{number}": {"type": "string"} for number in range(1200)}
        schema = {"type": "object", "properties": properties}
        given = {"type": "json_schema", "json_schema": {"name": "costly", "schema": schema}}
        body = {"model": model, "messages": [{"role": "user", "content": "Hi"}]}
        response = httpx.post(
            f"{url}/chat/completions", json={**body, "response_format": given}, timeout=60,
            trust_env=False,
        )  # fmt: skip
        assert response.status_code == 400
        assert "not too costly" in response.json()["error"]["message"]

    body = {"model": model, "prompt": "one two three", "max_tokens": 40, "ignore_eos": True,
            "stream": True, "speculation": {"draft_length": 0}}  # fmt: skip
    gaps = []
    with (
        httpx.stream("POST", f"{url}/completions", json=body, timeout=60, trust_env=False) as lines,
        ThreadPoolExecutor(4) as pool,
    ):
        heard = time.monotonic()
        compiling = []
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            compiling = compiling or [pool.submit(costly, index) for index in range(4)]
            gaps.append(time.monotonic() - heard)
            heard = time.monotonic()
        for future in compiling:
            future.result()
    # What they take together is several times as long.
    assert len(gaps) > 20 and max(gaps[1:]) < 1.0


class Person(pydantic.BaseModel):
    """What the package makes a schema of."""

    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)
    mood: Literal["happy", "sad"]


GREET = {
    "type": "function",
    "function": {
        "name": "greet",
        "description": "Greets somebody",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 12}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}


def test_the_openai_package_parses_models_and_calls_functions(ngram_cluster: Cluster) -> None:
    with openai.OpenAI(
        base_url=f"{ngram_cluster.url}/v1", api_key="unused",
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:  # fmt: skip
        request: dict[str, Any] = {
            "model": ngram_cluster.model,
            "messages": [{"role": "user", "content": QUESTION}],
            "temperature": 0,
            "max_tokens": 50,
        }
        parsed = client.chat.completions.parse(**request, response_format=Person)
        person = parsed.choices[0].message.parsed
        assert person is not None and person.name == "Anna" and person.age == 30
        choice = client.chat.completions.create(
            **request, extra_body={"structured_outputs": {"choice": ["chess", "football"]}}
        ).choices[0]
        assert choice.message.content == "chess" and choice.finish_reason == "stop"
        tools: Any = {"tools": [GREET], "tool_choice": {
            "type": "function", "function": {"name": "greet"}}}  # fmt: skip
        choice = client.chat.completions.create(**request, **tools).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls
        (call,) = choice.message.tool_calls
        assert call.function.name == "greet"
        assert set(json.loads(call.function.arguments)) == {"name"}
        with client.chat.completions.stream(**request, **tools) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls
        assert final.message.tool_calls[0].function.arguments == call.function.arguments
        with pytest.raises(openai.BadRequestError, match="chat template"):
            client.chat.completions.create(**request, tools=[GREET])


@pytest.mark.full
def test_64_schemas_at_once_are_valid_in_the_default_model(ngram_cluster: Cluster) -> None:
    def one(index: int) -> bool:
        return check_person(ask(ngram_cluster, **SCHEMA, temperature=1, seed=index, max_tokens=100))

    with ThreadPoolExecutor(64) as pool:
        results = list(pool.map(one, range(64)))
    assert sum(results) >= 48


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_heads_drafts_change_no_token(temperature: float) -> None:
    with running_cluster("--speculation", "fixed") as cluster:
        for fields in (SCHEMA, REGEX, {"response_format": {"type": "json_object"}}):
            given = {**fields, "temperature": temperature}
            plain = ask(cluster, **given, speculation={"draft_length": 0})
            assert plain["token_ids"] == ask(cluster, **given)["token_ids"]
