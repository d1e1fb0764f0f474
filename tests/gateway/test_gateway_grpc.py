"""GenerationService with a real channel."""

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.v1 import generation_pb2, generation_pb2_grpc, sampling_pb2

STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH
PATH = "/outrider.v1.GenerationService/Generate"
SETTINGS = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def channel(ready):
    with grpc.insecure_channel(f"127.0.0.1:{ready.grpc_port}") as channel:
        yield channel


@pytest.fixture(scope="module")
def stub(channel):
    return generation_pb2_grpc.GenerationServiceStub(channel)


def chat(*contents: str, role: str = "user") -> generation_pb2.ChatMessages:
    return generation_pb2.ChatMessages(
        messages=[generation_pb2.ChatMessage(role=role, content=text) for text in contents]
    )


def request(**fields) -> generation_pb2.GenerateRequest:
    if not {"prompt", "prompt_token_ids", "chat"} & set(fields):
        fields["prompt"] = "Once upon"
    return generation_pb2.GenerateRequest(**{"max_tokens": 8, **fields})


def answer(stub, message) -> tuple[str, list[int], generation_pb2.Finished]:
    responses = list(stub.Generate(message, timeout=20))
    assert [response.HasField("finished") for response in responses[:-1]] == [False] * (
        len(responses) - 1
    )
    text = "".join(response.text for response in responses)
    token_ids = [one for response in responses for one in response.token_ids]
    return text, token_ids, responses[-1].finished


def test_prompt_tokens_that_were_cached_are_told(ready, stub):
    ready.model.cached_prompt_tokens = 16
    try:
        assert answer(stub, request())[2].usage.cached_prompt_tokens == 16
    finally:
        ready.model.cached_prompt_tokens = 0


def test_an_answer_comes_in_pieces_and_ends_with_usage_and_seed(stub):
    text, token_ids, finished = answer(stub, request())
    assert text and len(token_ids) == 8
    assert finished.reason == LENGTH
    usage = finished.usage
    assert usage.completion_tokens == 8
    assert 0 < usage.accepted_prediction_tokens <= 8
    assert usage.drafts > 0
    again = answer(stub, request(sampling=sampling_pb2.SamplingParameters(seed=finished.seed)))
    assert again[1] == token_ids


def test_grpc_and_rest_give_the_same_tokens(ready, stub):
    sampling = sampling_pb2.SamplingParameters(seed=77)
    body = {
        "model": "smollm2-135m-instruct",
        "messages": [{"role": "user", "content": "Hello"}],
        "seed": 77,
        "max_tokens": 8,
        "return_token_ids": True,
    }
    rest = ready.client.post("/v1/chat/completions", json=body).json()
    text, token_ids, _ = answer(stub, request(chat=chat("Hello"), sampling=sampling))
    assert token_ids == rest["choices"][0]["token_ids"]
    assert text == rest["choices"][0]["message"]["content"]


def test_max_tokens_defaults_to_what_the_context_leaves(stub):
    message = generation_pb2.GenerateRequest(
        prompt_token_ids=generation_pb2.TokenIds(ids=[1, 2, 3])
    )
    _, token_ids, finished = answer(stub, message)
    assert len(token_ids) == 512 - 3
    assert finished.usage.prompt_tokens == 3


BAD = [
    (generation_pb2.GenerateRequest(), "input"),
    (request(model="gpt"), "model"),
    (request(prompt=""), "prompt"),
    (request(chat=chat()), "messages"),
    (request(chat=chat("Hi", role="god")), "messages[0].role"),
    (request(prompt_token_ids=generation_pb2.TokenIds()), "prompt_token_ids"),
    (request(prompt_token_ids=generation_pb2.TokenIds(ids=[49152])), "prompt_token_ids"),
    (request(prompt_token_ids=generation_pb2.TokenIds(ids=[1] * 512)), "prompt_token_ids"),
    (request(max_tokens=0), "max_tokens"),
    (request(max_tokens=2**32 - 1), "max_tokens"),
    (request(stop=[""]), "stop[0]"),
    (request(stop=["x"] * 17), "stop"),
    (request(stop_token_ids=[49152]), "stop_token_ids"),
    (request(speculation=sampling_pb2.SpeculationOverride(draft_length=6)), "speculation"),
    (request(sampling=sampling_pb2.SamplingParameters(temperature=-1)), "temperature"),
    (request(sampling=sampling_pb2.SamplingParameters(temperature=float("nan"))), "temperature"),
    (request(sampling=sampling_pb2.SamplingParameters(temperature=float("inf"))), "temperature"),
    (request(sampling=sampling_pb2.SamplingParameters(top_p=0)), "top_p"),
    (request(sampling=sampling_pb2.SamplingParameters(min_p=1.5)), "min_p"),
    (request(sampling=sampling_pb2.SamplingParameters(presence_penalty=3)), "presence_penalty"),
    (
        request(
            sampling=sampling_pb2.SamplingParameters(
                logit_bias=[sampling_pb2.LogitBias(token_id=10**6, bias=1)]
            )
        ),
        "logit_bias",
    ),
]


@pytest.mark.parametrize(("message", "field"), BAD)
def test_a_bad_request_is_invalid_argument_by_field_value_and_bound(stub, message, field):
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(message, timeout=20))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert field in caught.value.details() and "must be" in caught.value.details()


def code_of_raw(channel, data: bytes) -> grpc.StatusCode:
    call = channel.unary_stream(PATH)(data, timeout=20)
    try:
        list(call)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff",
        b"\x0a\x02\xc3\x28",  # model = bytes that are no UTF-8
        b"\x12\x05abc",  # a length beyond the end
        request().SerializeToString() + b"\xf8\x07\x01",  # field 127
    ],
)
def test_a_malformed_message_is_invalid_argument(channel, data):
    assert code_of_raw(channel, data) == grpc.StatusCode.INVALID_ARGUMENT


@given(data=st.binary(max_size=60))
@SETTINGS
def test_no_bytes_are_unknown_or_internal(channel, data):
    assert code_of_raw(channel, data) in (
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
    )


def test_a_client_that_cancels_is_cancelled_at_the_target(ready, stub):
    ready.model.step_seconds = 0.02
    cancelled = len(ready.model.cancelled)
    call = stub.Generate(request(max_tokens=400))
    next(call)
    call.cancel()
    ready.until(lambda: len(ready.model.cancelled) == cancelled + 1)
    ready.model.step_seconds = 0.0


def test_the_contexts_deadline_goes_to_the_target(ready, stub):
    answer(stub, request())
    assert 15 < ready.model.admitted[-1].sequences[0].deadline_seconds < 21
    list(stub.Generate(request()))
    assert ready.model.admitted[-1].sequences[0].deadline_seconds == 0


def test_a_gateway_that_is_not_ready_is_unavailable_with_a_retry_after(cluster):
    cluster.call(cluster.target.stop())
    cluster.start_gateway()
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request(), timeout=10))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "gateway" in caught.value.details()
    assert ("retry-after", "5") in [
        (one.key, one.value) for one in caught.value.trailing_metadata()
    ]


def test_the_service_is_in_the_descriptor_pool_that_reflection_reads():
    assert reflection_pb2_grpc and reflection_pb2
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]
    assert [method.name for method in service.methods] == ["Generate"]
    assert PATH == f"/{service.full_name}/Generate"
