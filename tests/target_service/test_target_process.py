"""`python -m target_service` as a process: SIGTERM in states that no drain begins from."""

import os
import signal
import socket
import subprocess
import sys
import time

import grpc
import pytest

from outrider.serving.channel import open_blocking_channel
from outrider.v1 import status_pb2, status_pb2_grpc

START_SECONDS = 60


def wait_for(address: str, state: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    with open_blocking_channel(address) as channel:
        stub = status_pb2_grpc.StatusServiceStub(channel)
        while True:
            try:
                status = stub.GetStatus(status_pb2.GetStatusRequest(), timeout=2)
                if status.state == state and any(stage.seconds for stage in status.stages):
                    return
            except grpc.RpcError:
                pass
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("fault", "state", "has_failed"),
    [
        ("target:config:hang", status_pb2.SERVICE_STATE_LOADING, False),
        ("target:config:raise", status_pb2.SERVICE_STATE_FAILED, True),
    ],
)
def test_sigterm_during_a_load_and_after_a_failure_is_honoured_at_once(
    fault: str, state: int, has_failed: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "target_service", "--port", str(port),
         "--on-startup-failure", "hold", "--inject-fault", fault],
        env=dict(os.environ),
    )  # fmt: skip
    try:
        wait_for(f"127.0.0.1:{port}", state)
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert (process.wait(20) != 0) is has_failed
        assert time.monotonic() - started < 5
    finally:
        process.kill()
        process.wait()
