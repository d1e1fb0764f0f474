"""A target that does not fit is refused by the name of the first field that does not."""

from contextlib import suppress
from dataclasses import replace

import grpc
import pytest
from draft_server import run, running
from link_client import Client, connect, hello, raw_stream

from draft_service.drafters.drafter import DrafterOffer, FeatureNeeds
from draft_service.handshake import (
    PROJECTION_CHUNK_BYTES,
    DraftIdentity,
    hello_reply,
    projection_messages,
    refusal_of,
)
from outrider.v1 import draft_pb2

IDENTITY = DraftIdentity(vocab_size=1000, tokenizer_sha256="a" * 64, eos_token_ids=(0,))
NEEDS = FeatureNeeds(
    layer_ids=(2, 15, 27),
    width=64,
    dtype="bfloat16",
    projection_sha256="f",
    target_hidden_size=96,
    projection=b"weights",
)


@pytest.mark.parametrize(
    ("changes", "field", "target_value", "draft_value"),
    [
        ({"protocol_version": 2}, "protocol_version", "2", "1"),
        ({"protocol_version": 0}, "protocol_version", "0", "1"),
        ({"noise_version": 9}, "noise_version", "9", "1"),
        (
            {"prefix_hash_algorithm": "crc32"},
            "prefix_hash_algorithm",
            "crc32",
            "splitmix64-chain-1",
        ),
        ({"target_boot_id": 0}, "target_boot_id", "0", "not 0"),
        ({"vocab_size": 0}, "identity.vocab_size", "0", "1 to 2147483647"),
        ({"vocab_size": 2**31}, "identity.vocab_size", "2147483648", "1 to 2147483647"),
        ({"max_sequence_length": 0}, "identity.max_sequence_length", "0", "1 to 4294967295"),
        ({"max_sequences": 0}, "max_sequences", "0", "1 to 4294967295"),
        ({"max_draft_length": 255}, "max_draft_length", "255", "0 to 254"),
        ({"eos_token_ids": [0, 1000]}, "identity.eos_token_ids", "1000", "below vocab_size 1000"),
    ],
)
def test_the_stream_ends_after_a_refusal_that_names_the_field_and_both_values(
    changes: dict, field: str, target_value: str, draft_value: str
) -> None:
    async def scenario() -> None:
        async with running() as service, raw_stream(service.address) as call:
            client = Client(call=call, hello=hello(**changes))
            reply = await client.shake_hands()
            assert (
                reply.refusal.field,
                reply.refusal.target_value,
                reply.refusal.draft_value,
            ) == (field, target_value, draft_value)
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
            assert service.count_of("handshakes refused") == 1

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"vocab_size": 999}, "identity.vocab_size"),
        ({"tokenizer_sha256": "b" * 64}, "identity.tokenizer_sha256"),
        ({"eos_token_ids": [0, 2]}, "identity.eos_token_ids"),
    ],
)
def test_a_model_drafter_refuses_another_models_tokens(changes: dict, field: str) -> None:
    assert refusal_of(hello(), IDENTITY, None) is None
    assert refusal_of(hello(**changes), IDENTITY, None).field == field
    assert refusal_of(hello(**changes), None, None) is None


def test_a_drafter_that_needs_features_says_so_and_refuses_a_target_without_them() -> None:
    message = hello(hidden_size=96)
    assert refusal_of(message, None, NEEDS).field == "features.layer_ids"
    message.features.CopyFrom(draft_pb2.FeatureOffer(layer_ids=[1, 2, 15, 27], dtypes=["float16"]))
    assert refusal_of(message, None, NEEDS).field == "features.dtypes"
    message.features.dtypes.append("bfloat16")
    assert refusal_of(message, None, NEEDS) is None
    offer = DrafterOffer(
        name="head",
        fingerprint="f",
        max_draft_length=8,
        max_sequence_length=100,
        feature_needs=NEEDS,
    )
    reply = hello_reply(message, offer=offer, draft_boot_id=1, refusal=None).hello
    assert list(reply.features.layer_ids) == [2, 15, 27]
    assert (reply.features.width, reply.features.transport) == (64, "inline")
    assert reply.features.shared_memory_name == ""
    reply = hello_reply(
        message, offer=offer, draft_boot_id=1, refusal=None, shared_memory_name="outrider-1"
    ).hello
    assert (reply.features.transport, reply.features.shared_memory_name) == (
        "shared_memory",
        "outrider-1",
    )


@pytest.mark.parametrize("hidden_size", [0, 95, 288])
def test_a_target_of_another_width_than_the_projection_takes_is_refused(hidden_size: int) -> None:
    offer = draft_pb2.FeatureOffer(layer_ids=[2, 15, 27], dtypes=["bfloat16"])
    assert refusal_of(hello(features=offer, hidden_size=96), None, NEEDS) is None
    refusal = refusal_of(hello(features=offer, hidden_size=hidden_size), None, NEEDS)
    assert (refusal.field, refusal.target_value, refusal.draft_value) == (
        "identity.hidden_size",
        str(hidden_size),
        "96",
    )


@pytest.mark.parametrize(
    ("size", "pieces"),
    [
        (0, [0]),
        (7, [7]),
        (PROJECTION_CHUNK_BYTES, [PROJECTION_CHUNK_BYTES]),
        (PROJECTION_CHUNK_BYTES + 1, [PROJECTION_CHUNK_BYTES, 1]),
    ],
)
def test_the_projection_follows_in_pieces_of_which_one_is_last(
    size: int, pieces: list[int]
) -> None:
    projection = (bytes(range(251)) * (size // 251 + 1))[:size]
    messages = [
        message.feature_projection
        for message in projection_messages(replace(NEEDS, projection=projection))
    ]
    assert [len(message.chunk) for message in messages] == pieces
    assert [message.is_last for message in messages] == [False] * (len(pieces) - 1) + [True]
    assert b"".join(message.chunk for message in messages) == projection


def test_no_projection_follows_where_no_features_are_needed() -> None:
    assert list(projection_messages(None)) == []


def test_a_projection_is_not_part_of_what_is_logged() -> None:
    assert "weights" not in repr(NEEDS)


def test_the_reply_says_what_the_drafter_is() -> None:
    async def scenario() -> None:
        async with running() as service, raw_stream(service.address) as call:
            reply = await Client(call=call, hello=hello(7, 12)).shake_hands()
            assert not reply.HasField("refusal")
            assert not reply.HasField("features")
            assert reply.draft_boot_id == service.lifecycle.boot_id
            assert (reply.drafter, reply.stream_epoch) == ("ngram", 12)
            assert (reply.max_draft_length, reply.max_sequence_length) == (32, 2**18)

    run(scenario())


def test_an_epoch_that_does_not_grow_is_refused_while_the_stream_is_open() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address, hello(7, 2)) as client:
            for epoch in (1, 2):
                async with raw_stream(service.address) as call:
                    reply = await Client(call=call, hello=hello(7, epoch)).shake_hands()
                    assert reply.refusal.field == "stream_epoch"
            await client.ping()

    run(scenario())


@pytest.mark.parametrize("kind", ["ping", "step", None])
def test_a_stream_that_begins_with_anything_else_ends_with_invalid_argument(
    kind: str | None,
) -> None:
    async def scenario() -> None:
        message = draft_pb2.LinkRequest()
        if kind is not None:
            getattr(message, kind).SetInParent()
        async with running() as service, raw_stream(service.address) as call:
            with suppress(grpc.aio.AioRpcError):
                await call.write(message)
            assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "hello in the first message" in await call.details()

    run(scenario())
