"""Clients that know nothing of this project: the openai package, and gRPC by reflection alone."""

import json
from collections.abc import Iterator

import grpc
import httpx
import openai
import pytest
from google.protobuf import json_format
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from bench.cluster import Cluster
from outrider.serving.choice_seed import choice_seed

QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def client(ngram_cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{ngram_cluster.url}/v1",
        api_key="unused",
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        yield client


def test_the_openai_package_chats_streams_and_completes(
    client: openai.OpenAI, ngram_cluster: Cluster
) -> None:
    model = client.models.list().data[0].id
    request = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 30,
    }
    whole = client.chat.completions.create(**request)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    details = whole.usage.completion_tokens_details
    assert details.accepted_prediction_tokens <= whole.usage.completion_tokens
    pieces = list(
        client.chat.completions.create(
            **request, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = client.completions.create(
        model=model, prompt="one two three one two three one two", max_tokens=6, temperature=0
    )
    assert completion.choices[0].text
    assert completion.usage.completion_tokens == 6
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**{**request, "temperature": -1})


def test_several_answers_are_those_of_their_seeds_and_share_the_prompt(
    client: openai.OpenAI,
) -> None:
    model = client.models.list().data[0].id
    # Longer than a block, so that there is something to share.
    question = "Here is a list of things to count: " + "apples, pears, " * 12 + "and so on. " * 3
    request = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "temperature": 1,
        "max_tokens": 8,
        "seed": 11,
    }
    answer = client.chat.completions.create(**request, n=3)
    alone = client.chat.completions.create(**{**request, "seed": choice_seed(11, 2)})
    assert answer.choices[2].message.content == alone.choices[0].message.content
    assert answer.choices[0].message.content != answer.choices[1].message.content
    assert answer.usage.prompt_tokens == alone.usage.prompt_tokens
    assert alone.usage.prompt_tokens_details.cached_tokens >= 32


class ReflectingClient:
    """What grpcurl does: asks the server for its descriptors and calls by name with JSON."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.database)

    def call(
        self, service: str, method: str, request: dict[str, object]
    ) -> list[dict[str, object]]:
        descriptor = self.pool.FindServiceByName(service).methods_by_name[method]
        request_class = GetMessageClass(descriptor.input_type)
        response_class = GetMessageClass(descriptor.output_type)
        rpc = self.channel.unary_stream if descriptor.server_streaming else self.channel.unary_unary
        answer = rpc(
            f"/{service}/{method}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )(json_format.ParseDict(request, request_class()), timeout=60)
        responses = answer if descriptor.server_streaming else [answer]
        return [
            json_format.MessageToDict(response, preserving_proto_field_name=True)
            for response in responses
        ]


@pytest.fixture(scope="module")
def reflecting(ngram_cluster: Cluster) -> Iterator[ReflectingClient]:
    page = ngram_cluster.get("/status").json()
    port = page["details"]["gateway"]["configuration"]["port"]
    client = ReflectingClient(f"127.0.0.1:{port}")
    yield client
    client.channel.close()


def test_a_client_that_only_has_reflection_finds_and_calls_everything(
    reflecting: ReflectingClient, ngram_cluster: Cluster
) -> None:
    assert {
        "outrider.v1.GenerationService",
        "outrider.v1.StatusService",
        "grpc.health.v1.Health",
    } <= set(reflecting.database.get_services())
    (health,) = reflecting.call("grpc.health.v1.Health", "Check", {})
    assert health == {"status": "SERVING"}
    (status,) = reflecting.call("outrider.v1.StatusService", "GetStatus", {})
    assert status["state"] == "SERVICE_STATE_SERVING"
    request = {
        "chat": {"messages": [{"role": "user", "content": QUESTION}]},
        "sampling": {"temperature": 0},
        "max_tokens": 30,
    }
    pieces = reflecting.call("outrider.v1.GenerationService", "Generate", request)
    text = "".join(str(piece.get("text", "")) for piece in pieces)
    rest = ngram_cluster.complete(
        messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=30
    )
    assert text == rest["choices"][0]["message"]["content"]
    assert pieces[-1]["finished"]["reason"] == "FINISH_REASON_STOP"


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "sampling": {"temperature": -1}}, "temperature"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"chat": {"messages": []}}, "messages"),
        ({"prompt": "a", "model": "another"}, "another"),
        ({"prompt": "word " * 9000, "max_tokens": 1}, "8191"),
    ],
)
def test_bad_requests_name_the_field_over_grpc(
    reflecting: ReflectingClient, request_: dict[str, object], words: str
) -> None:
    with pytest.raises(grpc.RpcError, match=words) as error_info:
        reflecting.call("outrider.v1.GenerationService", "Generate", request_)
    assert error_info.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": "hello"}, "messages"),
        ("completions", {"prompt": "word " * 9000}, "prompt"),
        ("completions", {"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ("completions", {"prompt": "a", "max_tokens": 10**30}, "max_tokens"),
        ("completions", {"prompt": "a", "temperature": "hot"}, "temperature"),
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "a", "seed": -1}, "seed"),
        ("completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
        ("completions", {"prompt": "a", "surprise": 3}, "surprise"),
        ("completions", {"prompt": [99999999]}, "prompt"),
        ("completions", b'{"prompt": "\xff"}', "UTF-8"),
        ("completions", b"{", "JSON"),
    ],
)
def test_bad_requests_name_the_field_over_rest(
    ngram_cluster: Cluster, path: str, body: dict[str, object] | bytes, words: str
) -> None:
    if isinstance(body, dict):
        body = json.dumps({"model": ngram_cluster.model, **body}).encode()
    response = httpx.post(
        f"{ngram_cluster.url}/v1/{path}",
        content=body,
        headers={"content-type": "application/json"},
        timeout=30,
        trust_env=False,
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert words in error["message"], error
    assert error["type"] == "invalid_request_error"
