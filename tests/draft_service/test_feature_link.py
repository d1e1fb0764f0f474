"""Features over a real stream: what the handshake settles, and the life of the shared memory."""

import errno
import os
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count

import grpc
import pytest
from draft_server import Running, run, running, until
from feature_drafter import (
    HIDDEN_SIZE,
    ROW_BYTES,
    FeatureDrafter,
    inline_columns,
    rows_of,
    shared_columns,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from link_client import Client, Row, drafts_in, hello, raw_stream

from draft_service.boot import BootedDrafter
from draft_service.config import DraftConfig
from draft_service.first_draft import FirstDraft
from draft_service.handshake import PROJECTION_CHUNK_BYTES
from draft_service.servicer import FEATURE_RING_BYTES
from outrider.serving.columns import pack
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.shared_ring import (
    RING_NAME_PREFIX,
    SHARED_MEMORY_DIRECTORY,
    SharedRing,
    host_id,
)
from outrider.v1 import draft_pb2

TEXT = list(range(100, 112))
PROJECTION = bytes(range(256)) * (PROJECTION_CHUNK_BYTES // 256 * 2 + 1)


@asynccontextmanager
async def serving(drafter: FeatureDrafter, **configuration: object) -> AsyncIterator[Running]:
    def boot(config: DraftConfig, report: Lifecycle) -> BootedDrafter:
        report.enter("first_decode")
        evidence = FirstDraft(prompt_token_ids=(1,), draft_token_ids=(2,), seconds=0.1)
        return BootedDrafter(drafter=drafter, identity=None, first_draft=evidence, device="cpu")

    async with running(boot=boot, draft="ngram", **configuration) as service:
        yield service


def feature_hello(target_boot_id: int = 7, *, host: str = "", **changes: object) -> draft_pb2.Hello:
    offer = draft_pb2.FeatureOffer(layer_ids=[1, 3], dtypes=["bfloat16"], host_id=host)
    return hello(target_boot_id, hidden_size=HIDDEN_SIZE, features=offer, **changes)


@asynccontextmanager
async def connect(
    address: str, message: draft_pb2.Hello
) -> AsyncIterator[tuple[Client, draft_pb2.HelloReply, bytes]]:
    """A stream behind its greeting, which is read as it has to come."""
    async with raw_stream(address) as call:
        client = Client(call=call, hello=message)
        await client.write(hello=message)
        reply = (await client.read()).hello
        assert not reply.HasField("refusal"), reply
        projection, is_last = b"", False
        while not is_last:
            response = await client.read()
            assert response.WhichOneof("kind") == "feature_projection"
            assert len(response.feature_projection.chunk) <= PROJECTION_CHUNK_BYTES
            projection += response.feature_projection.chunk
            is_last = response.feature_projection.is_last
        yield client, reply, projection


# Other processes may have rings as well.
OWN_PREFIX = f"{RING_NAME_PREFIX}test-{secrets.token_hex(8)}-"


def ring_files() -> set[str]:
    return {path.name for path in SHARED_MEMORY_DIRECTORY.glob(f"{OWN_PREFIX}*")}


@pytest.fixture(autouse=True)
def no_ring_is_left() -> Iterator[None]:
    numbers = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "draft_service.servicer.random_ring_name", lambda: f"{OWN_PREFIX}{next(numbers)}"
        )
        yield
    assert ring_files() == set()


@pytest.mark.parametrize(
    ("transport", "host", "expected"),
    [
        ("auto", "own", "shared_memory"),
        ("auto", "another", "inline"),
        ("auto", "", "inline"),
        ("inline", "own", "inline"),
        ("shared_memory", "own", "shared_memory"),
    ],
)
def test_features_come_by_shared_memory_only_from_this_host_and_where_it_is_allowed(
    transport: str, host: str, expected: str
) -> None:
    async def scenario() -> None:
        message = feature_hello(host=host_id() if host == "own" else host)
        async with serving(FeatureDrafter(PROJECTION), feature_transport=transport) as service:
            async with connect(service.address, message) as (_, reply, projection):
                needs = reply.features
                assert (needs.transport, needs.width, needs.dtype) == (expected, 2, "bfloat16")
                assert list(needs.layer_ids) == [1, 3]
                names = {needs.shared_memory_name} - {""}
                assert ring_files() == names
                assert bool(names) is (expected == "shared_memory")
                assert projection == PROJECTION

    run(scenario())


def test_a_target_without_shared_memory_is_refused_where_nothing_else_is_allowed() -> None:
    async def scenario() -> None:
        async with serving(FeatureDrafter(), feature_transport="shared_memory") as service:
            message = feature_hello(host="another")
            async with raw_stream(service.address) as call:
                reply = await Client(call=call, hello=message).shake_hands()
                refusal = reply.refusal
                assert refusal.field == "features.transport"
                assert (refusal.target_value, refusal.draft_value) == ("inline", "shared_memory")

    run(scenario())


def test_neither_side_shares_memory_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        monkeypatch.setattr("draft_service.servicer.host_id", lambda: "")
        async with (
            serving(FeatureDrafter()) as service,
            connect(service.address, feature_hello()) as (_, reply, _),
        ):
            assert reply.features.transport == "inline"

    run(scenario())


def test_a_full_memory_makes_features_come_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def scenario() -> None:
        monkeypatch.setattr(os, "posix_fallocate", full)
        async with (
            serving(FeatureDrafter()) as service,
            connect(service.address, feature_hello(host=host_id())) as (_, reply, _),
        ):
            assert (reply.features.transport, reply.features.shared_memory_name) == ("inline", "")
            assert service.count_of("links without shared memory") == 1

    run(scenario())


@pytest.mark.parametrize("transport", ["auto", "inline"])
def test_a_prompt_in_chunks_is_drafted_for_once_its_features_are_there(transport: str) -> None:
    async def scenario() -> None:
        drafter = FeatureDrafter()
        async with (
            serving(drafter, feature_transport=transport) as service,
            connect(service.address, feature_hello(host=host_id())) as (client, reply, _),
        ):
            name = reply.features.shared_memory_name
            ring = SharedRing.attach(name) if name else None
            assert name not in ring_files()

            def columns(*features: tuple[int, int]) -> dict[str, bytes]:
                return shared_columns(ring, *features) if ring else inline_columns(*features)

            await client.open((0, TEXT))
            for chunk in ((0, 5), (5, 6)):
                row = Row(0, TEXT, 0, draft_length=0)
                await client.write(step=client.step_of(row, **columns(chunk)))
            await until(lambda: drafter.states and drafter.states[0].worked_length == 11)
            draft = await client.step(Row(0, [*TEXT, 1]), **columns((11, 1)))
            assert drafts_in(draft) == {0: [12]}
            assert client.seen == []
            if ring:
                ring.close()

    run(scenario())


def test_a_target_may_send_inline_though_shared_memory_was_offered() -> None:
    async def scenario() -> None:
        async with (
            serving(FeatureDrafter()) as service,
            connect(service.address, feature_hello(host=host_id())) as (client, reply, _),
        ):
            assert reply.features.transport == "shared_memory"
            await client.open((0, TEXT))
            draft = await client.step(Row(0, [*TEXT, 1]), **inline_columns((10, 2)))
            assert drafts_in(draft) == {0: [12]}

    run(scenario())


def test_two_mebibytes_of_inline_features_pass_in_one_step() -> None:
    async def scenario() -> None:
        count = 2 * 2**20 // ROW_BYTES
        drafter = FeatureDrafter(max_sequence_length=2**20)
        text = [1] * (count + 1)
        async with (
            serving(drafter) as service,
            connect(service.address, feature_hello()) as (client, _, _),
        ):
            await client.open((0, text))
            row = Row(0, text, 0, draft_length=0)
            await client.write(step=client.step_of(row, **inline_columns((0, count))))
            await client.ping()
            await until(lambda: bool(drafter.given))
            assert drafter.given[0].rows == rows_of(0, count)

    run(scenario())


@pytest.mark.parametrize("is_attached", [True, False])
def test_the_ring_ends_with_the_link(is_attached: bool) -> None:
    async def scenario() -> None:
        async with serving(FeatureDrafter()) as service:
            message = feature_hello(host=host_id())
            async with connect(service.address, message) as (client, reply, _):
                name = reply.features.shared_memory_name
                assert name in ring_files()
                if is_attached:
                    SharedRing.attach(name).close()
                    assert name not in ring_files()
                await client.call.done_writing()
                await client.call.code()
                await until(lambda: name not in ring_files())
            assert service.lifecycle.is_serving

    run(scenario())


def test_each_link_has_a_ring_of_its_own_and_a_newer_stream_ends_the_older_ones() -> None:
    async def scenario() -> None:
        async with serving(FeatureDrafter()) as service:
            first = feature_hello(host=host_id())
            second = feature_hello(8, host=host_id())
            newer = feature_hello(host=host_id(), stream_epoch=2)
            async with (
                connect(service.address, first) as (_, one, _),
                connect(service.address, second) as (_, two, _),
                connect(service.address, newer) as (_, three, _),
            ):
                names = [reply.features.shared_memory_name for reply in (one, two, three)]
                assert len(set(names)) == 3
                await until(lambda: names[0] not in ring_files())
                assert {names[1], names[2]} <= ring_files()

    run(scenario())


def test_a_target_that_leaves_in_the_middle_of_the_greeting_leaves_no_ring() -> None:
    async def scenario() -> None:
        # More than flow control lets through without a reader.
        async with serving(FeatureDrafter(PROJECTION * 20)) as service:
            async with raw_stream(service.address) as call:
                client = Client(call=call, hello=feature_hello(host=host_id()))
                name = (await client.shake_hands()).features.shared_memory_name
                assert name in ring_files()
            await until(lambda: name not in ring_files())

    run(scenario())


def test_a_target_that_does_not_read_the_greeting_can_be_replaced() -> None:
    async def scenario() -> None:
        async with serving(FeatureDrafter(PROJECTION * 20)) as service:
            async with raw_stream(service.address) as call:
                client = Client(call=call, hello=feature_hello(host=host_id()))
                name = (await client.shake_hands()).features.shared_memory_name
                async with connect(service.address, feature_hello(stream_epoch=2)):
                    await until(lambda: name not in ring_files())

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"hidden_size": 7}, "identity.hidden_size"), ({"vocab_size": 0}, "identity.vocab_size")],
)
def test_a_refusal_makes_no_ring_and_sends_no_projection(
    changes: dict[str, int], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    async def scenario() -> None:
        monkeypatch.setattr(SharedRing, "create", lambda name, capacity: made.append(name))
        message = feature_hello(host=host_id())
        for name, value in changes.items():
            setattr(message.identity, name, value)
        async with serving(FeatureDrafter()) as service, raw_stream(service.address) as call:
            client = Client(call=call, hello=message)
            reply = await client.shake_hands()
            assert reply.refusal.field == field
            assert reply.features.shared_memory_name == ""
            assert await call.read() is grpc.aio.EOF
            assert client.seen == [] and made == []

    run(scenario())


def test_an_older_epoch_makes_no_ring() -> None:
    async def scenario() -> None:
        async with serving(FeatureDrafter()) as service:
            message = feature_hello(host=host_id(), stream_epoch=2)
            async with connect(service.address, message):
                before = ring_files()
                async with raw_stream(service.address) as call:
                    client = Client(call=call, hello=feature_hello(host=host_id()))
                    assert (await client.shake_hands()).refusal.field == "stream_epoch"
                    assert ring_files() == before

    run(scenario())


def test_steps_behind_the_end_of_their_link_find_a_closed_ring() -> None:
    """The engine thread may still have messages of a stream whose ring is closed."""

    async def scenario() -> None:
        drafter = FeatureDrafter()
        async with serving(drafter) as service:
            message = feature_hello(host=host_id())
            async with connect(service.address, message) as (client, reply, _):
                ring = SharedRing.attach(reply.features.shared_memory_name)
                for _ in range(50):
                    await client.open((0, TEXT))
                    step = client.step_of(Row(0, TEXT, 0), **shared_columns(ring, (0, 11)))
                    await client.write(step=step)
                client.call.cancel()
            ring.close()
            await until(lambda: drafter.states == [])
            assert service.lifecycle.is_serving

    run(scenario())


LIVE_GENERATION = 0xB0A7C0DE
numbers = st.integers(0, 12) | st.integers(0, 2**32 - 1)
pairs = st.lists(numbers, min_size=2, max_size=2)
hostile_columns = st.fixed_dictionaries(
    {},
    optional={
        "feature_counts": pairs.map(lambda each: pack(each, "<u4")) | st.binary(max_size=9),
        "feature_first_positions": pairs.map(lambda each: pack(each, "<u4")),
        "shared_memory_offsets": pairs.map(lambda each: pack(each, "<u8")) | st.binary(max_size=17),
        "inline_features": st.binary(max_size=60),
    },
)


@settings(max_examples=40, deadline=None)
@given(each=st.lists(hostile_columns, min_size=1, max_size=4))
def test_hostile_feature_columns_disturb_no_other_row(each: list[dict[str, bytes]]) -> None:
    async def scenario() -> None:
        async with (
            serving(FeatureDrafter()) as service,
            connect(service.address, feature_hello(host=host_id())) as (client, reply, _),
        ):
            ring = SharedRing.attach(reply.features.shared_memory_name)
            await client.open((3, TEXT), generation=LIVE_GENERATION)
            await client.open((0, TEXT), (1, TEXT))
            for columns in each:
                draft = await client.step(Row(0, [*TEXT, 1]), Row(1, [*TEXT, 1]), **columns)
                assert drafts_in(draft).keys() == {0, 1}
            row = Row(3, [*TEXT, 1], generation=LIVE_GENERATION)
            draft = await client.step(row, **shared_columns(ring, (10, 2)))
            assert drafts_in(draft) == {3: [12]}
            assert LIVE_GENERATION not in {row[1] for row in client.rows_seen("resync")}
            assert service.lifecycle.is_serving
            ring.close()

    run(scenario())


def test_the_ring_holds_what_it_says() -> None:
    async def scenario() -> None:
        async with (
            serving(FeatureDrafter()) as service,
            connect(service.address, feature_hello(host=host_id())) as (_, reply, _),
        ):
            ring = SharedRing.attach(reply.features.shared_memory_name)
            assert ring.capacity == FEATURE_RING_BYTES
            ring.close()

    run(scenario())
