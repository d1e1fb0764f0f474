"""Slow, failing and stopping: what a target sees on its stream."""

import asyncio
from contextlib import suppress

import grpc
import pytest
from draft_server import run, running
from link_client import Client, Row, connect, drafts_in, hello, raw_stream

from draft_service.counters import Counters
from draft_service.link_sessions import terms_of
from draft_service.links import (
    CONGESTION_PAUSE_SECONDS,
    MAX_WAITING_ANSWERS,
    MAX_WAITING_BYTES,
    MAX_WAITING_REQUESTS,
    TargetLink,
)
from outrider.v1 import draft_pb2, status_pb2

TEXT = [10, 11, 12, 13] * 4


def test_a_ping_is_answered_while_a_proposal_runs() -> None:
    async def scenario() -> None:
        async with running(inject_fault="draft:propose:delay=0.5") as service:
            async with connect(service.address) as client:
                await client.open((0, TEXT))
                await client.write(step=client.step_of(Row(0, TEXT, 0)))
                for ping_id in range(5):
                    await client.ping(ping_id)
                # Five round trips, and the draft is still to come.
                assert client.seen == []
                assert drafts_in(await client.next("draft")) == {0: [10, 11, 12, 13]}

    run(scenario())


def test_a_proposal_that_raises_fails_the_service_and_ends_every_stream() -> None:
    async def scenario() -> None:
        async with running(inject_fault="draft:propose:raise@2") as service:
            async with (
                connect(service.address, hello(1)) as first,
                connect(service.address, hello(2)) as second,
            ):
                await first.open((0, TEXT))
                await first.step(Row(0, TEXT, 0))
                await first.write_last(step=first.step_of(Row(0, TEXT, 0)))
                for client in (first, second):
                    assert await client.call.code() is grpc.StatusCode.UNAVAILABLE
                    assert "FAILED in stage propose" in await client.call.details()
                status = service.lifecycle.status()
                assert status.state == status_pb2.SERVICE_STATE_FAILED
                assert status.failure.stage == "propose"
                assert "injected fault at draft:propose" in status.failure.reason
            async with raw_stream(service.address) as call:
                await Client(call=call, hello=hello()).write_last(hello=hello())
                assert await call.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_a_proposal_that_hangs_fails_the_service_once_the_watchdog_looks() -> None:
    async def scenario() -> None:
        async with running(inject_fault="draft:propose:delay=0.5", step_timeout=0.05) as service:
            async with connect(service.address) as client:
                await client.open((0, TEXT))
                await client.write(step=client.step_of(Row(0, TEXT, 0)))
                await asyncio.sleep(0.1)
                service.lifecycle.check_timeouts()
                assert await client.call.code() is grpc.StatusCode.UNAVAILABLE
                assert service.lifecycle.status().failure.stage == "propose"

    run(scenario())


def test_draining_says_go_away_and_serves_until_the_target_leaves() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            service.lifecycle.drain()
            draining = asyncio.create_task(service.service.drain(10))
            assert (await client.next("go_away")).reason
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}
            assert not draining.done()
            await client.call.done_writing()
            await draining
            assert await client.call.code() is grpc.StatusCode.OK
            async with raw_stream(service.address) as call:
                assert await call.code() is grpc.StatusCode.UNAVAILABLE

    run(scenario())


def test_answers_that_a_target_does_not_read_are_dropped_once_too_many_wait() -> None:
    async def scenario() -> None:
        counters = Counters()
        link = TargetLink(terms_of(hello()), counters)
        responses = [
            draft_pb2.LinkResponse(pong=draft_pb2.Pong(ping_id=ping_id))
            for ping_id in range(MAX_WAITING_ANSWERS + 3)
        ]
        link.send(responses)
        assert counters.of("answers that a target did not read") == 3
        for ping_id in range(MAX_WAITING_ANSWERS):
            assert (await link.next_answer()).pong.ping_id == ping_id
        link.send(responses[:1])
        assert (await link.next_answer()).pong.ping_id == 0

    run(scenario())


def test_a_malformed_protobuf_ends_its_own_stream_only() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            async with grpc.aio.insecure_channel(service.address) as channel:
                call = channel.stream_stream("/outrider.v1.DraftService/Link")()
                with suppress(grpc.aio.AioRpcError):
                    await call.write(b"\xff\xff\xff\xff")
                assert await call.code() is not grpc.StatusCode.OK
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}

    run(scenario())


@pytest.mark.parametrize("size", [1, MAX_WAITING_BYTES // 4])
def test_a_stream_is_read_no_further_than_its_bounds(size: int) -> None:
    async def scenario() -> None:
        link = TargetLink(terms_of(hello()), Counters())
        most = min(MAX_WAITING_REQUESTS, -(-MAX_WAITING_BYTES // size))
        for _ in range(most):
            await asyncio.wait_for(link.make_room(size), 1.0)
        waiting = asyncio.create_task(link.make_room(size))
        await asyncio.sleep(3 * CONGESTION_PAUSE_SECONDS)
        assert not waiting.done()
        link.mark_handled(size)
        await asyncio.wait_for(waiting, 1.0)

    asyncio.run(scenario())
