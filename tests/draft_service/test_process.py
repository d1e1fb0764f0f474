"""`python -m draft_service` as a process of its own: boot, status, SIGTERM, failures."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
from draft_server import run
from link_client import Row, connect, drafts_in

from outrider.serving.channel import open_channel
from outrider.v1 import status_pb2, status_pb2_grpc

TEXT = [10, 11, 12, 13] * 4
PATIENCE_SECONDS = 30


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def draft_process(*flags: str, **variables: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """A process and its address; killed at the end if it still runs."""
    port = free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "draft_service", "--port", str(port), "--threads", "1", *flags],
        env={**environment, "OUTRIDER_DRAFT": "ngram", **variables},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, f"127.0.0.1:{port}"
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


async def statuses_until(address: str, state: int) -> list[status_pb2.ServiceStatus]:
    """Every status that a watcher sees up to the first one in `state`."""
    seen = []
    async with open_channel(address) as channel:
        call = status_pb2_grpc.StatusServiceStub(channel).WatchStatus(
            status_pb2.WatchStatusRequest(), wait_for_ready=True, timeout=PATIENCE_SECONDS
        )
        async for status in call:
            seen.append(status)
            if status.state == state:
                return seen
    raise AssertionError(f"never {status_pb2.ServiceState.Name(state)}: {seen[-1:]}")


def test_it_boots_says_what_it_is_drafts_and_stops_on_sigterm() -> None:
    with draft_process(OUTRIDER_MAX_SEQUENCES="9") as (process, address):

        async def scenario() -> None:
            status = (await statuses_until(address, status_pb2.SERVICE_STATE_SERVING))[-1]
            assert status.service == "draft"
            assert [(stage.name, stage.state) for stage in status.stages] == [
                ("config", status_pb2.STAGE_STATE_DONE),
                ("first_decode", status_pb2.STAGE_STATE_DONE),
            ]
            assert status.stages[1].detail.startswith("proposed [6, 7, 8, 5] behind 17 tokens")
            assert status.configuration["draft"] == "ngram"
            assert status.limits["max_sequences"] == "9"
            async with connect(address) as client:
                await client.open((0, TEXT))
                assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}
                process.send_signal(signal.SIGTERM)
                assert (await client.next("go_away")).reason
                await client.call.done_writing()
                assert await client.call.code() is grpc.StatusCode.OK

        run(scenario())
        assert process.wait(PATIENCE_SECONDS) == 0


def test_the_ngram_service_never_loads_torch() -> None:
    code = (
        "import sys, draft_service.__main__, draft_service.boot, draft_service.service;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("point", ["config", "first_decode"])
def test_a_start_up_that_raises_is_explained_and_never_serves(point: str) -> None:
    flags = ("--on-startup-failure", "hold", "--inject-fault", f"draft:{point}:raise")
    with draft_process(*flags) as (process, address):
        seen = run(statuses_until(address, status_pb2.SERVICE_STATE_FAILED))
        assert seen[-1].failure.stage == point
        assert "injected fault" in seen[-1].failure.reason
        assert all(status.state != status_pb2.SERVICE_STATE_SERVING for status in seen)
        # It stays up to say so to whoever asks later.
        time.sleep(0.7)
        again = run(statuses_until(address, status_pb2.SERVICE_STATE_FAILED))
        assert again[0].failure.stage == point
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) != 0


def test_a_start_up_that_fails_ends_the_process_with_an_error() -> None:
    with draft_process("--inject-fault", "draft:first_decode:raise") as (process, _):
        assert process.wait(PATIENCE_SECONDS) != 0


@pytest.mark.parametrize("action", ["raise", "hang", "exit"])
def test_a_proposal_that_fails_after_serving_ends_the_process_with_an_error(action: str) -> None:
    flags = ("--inject-fault", f"draft:propose:{action}", "--step-timeout", "0.3")
    with draft_process(*flags) as (process, address):

        async def scenario() -> None:
            await statuses_until(address, status_pb2.SERVICE_STATE_SERVING)
            async with connect(address) as client:
                await client.open((0, TEXT))
                await client.write_last(step=client.step_of(Row(0, TEXT, 0)))
                assert await client.call.code() is grpc.StatusCode.UNAVAILABLE

        run(scenario())
        assert process.wait(PATIENCE_SECONDS) != 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag", "1"], "no-such-flag"),
        (["--draft", "eagle9"], "draft"),
        (["--draft", "standalone"], "draft-model is ''"),
        (["--draft", "ngram", "--draft-model", "x"], "draft-model is 'x'"),
        (["--max-sequences", "0"], "max-sequences is '0'"),
        (["--inject-fault", "draft:nowhere:raise"], "nowhere"),
    ],
)
def test_a_wrong_configuration_is_said_in_words(flags: list[str], words: str) -> None:
    with draft_process(*flags) as (process, _):
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode != 0
        assert words in error
        assert "Traceback" not in error


def test_an_unknown_variable_is_an_error() -> None:
    with draft_process(OUTRIDER_NO_SUCH="1") as (process, _):
        _, error = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode != 0
        assert "OUTRIDER_NO_SUCH" in error


def test_a_port_that_is_taken_is_said_in_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with draft_process("--port", port) as (process, _):
            _, error = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode != 0
            assert f"cannot listen on 127.0.0.1:{port}" in error
