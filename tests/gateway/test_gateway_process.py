"""`python -m gateway` as a process, with fake peers in the test."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import grpc
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.serving.stages import GATEWAY_STAGES
from outrider.v1 import generation_pb2, generation_pb2_grpc, status_pb2, status_pb2_grpc

MODEL = "smollm2-135m-instruct"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class GatewayProcess:
    def __init__(self, process: subprocess.Popen, port: int, rest_port: int, said: IO[str]) -> None:
        self._said = said
        self.process = process
        self.port = port
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{rest_port}", trust_env=False)

    def readyz(self) -> dict:
        try:
            response = self.client.get("/readyz", timeout=2)
        except httpx.TransportError:
            return {"ready": False, "services": []}
        body = response.json()
        assert body["ready"] == (response.status_code == 200)
        return body

    def gateway_line(self) -> dict:
        lines = [one for one in self.readyz()["services"] if one["service"] == "gateway"]
        return lines[0] if lines else {"state": "", "stage": "", "reason": ""}

    def end(self) -> str:
        """Waits for the process to end by itself; returns what it said."""
        self.process.wait(20)
        self._said.seek(0)
        return self._said.read()

    def until(self, condition, seconds: float = 20) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.readyz()
            time.sleep(0.02)


@contextmanager
def gateway_process(
    cluster, *arguments: str, interpreter: tuple[str, ...] = (), **variables: str
) -> Iterator[GatewayProcess]:
    port, rest_port = free_port(), free_port()
    command = [
        sys.executable, *interpreter, "-m", "gateway",
        "--port", str(port), "--rest-port", str(rest_port),
        "--target-address", cluster.target.address, "--draft-address", cluster.draft.address,
        *arguments,
    ]  # fmt: skip
    environment = {**os.environ, **variables}
    # A file: a pipe that nobody reads would hold the process up.
    said = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(command, stderr=said, text=True, env=environment)
    gateway = GatewayProcess(process, port, rest_port, said)
    try:
        yield gateway
    finally:
        gateway.client.close()
        if process.poll() is None:
            process.kill()
        process.wait()
        said.close()


def test_a_serving_process_has_loaded_neither_torch_nor_transformers(cluster):
    with gateway_process(cluster, interpreter=("-X", "importtime")) as gateway:
        gateway.until(lambda: gateway.readyz()["ready"])
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{gateway.client.base_url.port}/v1",
            api_key="none",
            http_client=httpx.Client(trust_env=False),
        )
        completion = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
        )
        client.close()
        assert completion.usage.completion_tokens == 4
        with grpc.insecure_channel(f"127.0.0.1:{gateway.port}") as channel:
            check_grpc(channel)
        gateway.process.send_signal(signal.SIGTERM)
        said = gateway.end()
    assert gateway.process.returncode == 0
    lines = [line for line in said.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[-1].strip() for line in lines}
    assert "gateway.service" in imported
    roots = {name.split(".")[0] for name in imported}
    assert roots.isdisjoint({"torch", "transformers"})


def check_grpc(channel: grpc.Channel) -> None:
    """Health, status, reflection and Generate on one port."""
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "outrider.v1.GenerationService"):
        response = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
    status = status_pb2_grpc.StatusServiceStub(channel).GetStatus(status_pb2.GetStatusRequest())
    assert status.service == "gateway"
    assert status.configuration["speculation"] == "auto"
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answered = next(reflection.ServerReflectionInfo(iter([asked])))
    names = {service.name for service in answered.list_services_response.service}
    assert {
        "outrider.v1.GenerationService", "outrider.v1.StatusService", "grpc.health.v1.Health",
    } <= names  # fmt: skip
    asked = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="outrider.v1.GenerationService"
    )
    answered = next(reflection.ServerReflectionInfo(iter([asked])))
    assert answered.file_descriptor_response.file_descriptor_proto
    request = generation_pb2.GenerateRequest(prompt="Hi", max_tokens=3)
    responses = list(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request))
    assert sum(len(response.token_ids) for response in responses) == 3


@pytest.mark.parametrize("stage", GATEWAY_STAGES)
def test_a_fault_in_a_stage_holds_the_gateway_with_stage_and_reason(cluster, stage):
    with gateway_process(
        cluster, "--on-startup-failure", "hold", OUTRIDER_INJECT_FAULT=f"gateway:{stage}:raise"
    ) as gateway:
        gateway.until(lambda: gateway.gateway_line()["state"] == "FAILED")
        line = gateway.gateway_line()
        assert line["stage"] == stage
        assert f"injected fault at gateway:{stage}" in line["reason"]
        response = gateway.client.post("/v1/chat/completions", json={})
        assert response.status_code == 503
        assert stage in response.json()["error"]["message"]
        gateway.process.send_signal(signal.SIGTERM)
        gateway.end()
        assert gateway.process.returncode == 1


def test_a_stage_that_hangs_fails_by_its_timeout(cluster):
    with gateway_process(
        cluster, "--startup-timeout", "2", "--on-startup-failure", "hold",
        OUTRIDER_INJECT_FAULT="gateway:handshake:hang",
    ) as gateway:  # fmt: skip
        gateway.until(lambda: gateway.gateway_line()["state"] == "FAILED")
        line = gateway.gateway_line()
        assert line["stage"] == "handshake"
        assert "--startup-timeout 2" in line["reason"]


def test_by_default_a_failed_start_up_exits_non_zero_and_says_why(cluster):
    cluster.model.info.name = "another"
    with gateway_process(cluster) as gateway:
        said = gateway.end()
    assert gateway.process.returncode == 1
    assert "FAILED in stage handshake: ModelMismatch: name is 'another'" in said


def test_a_stop_during_start_up_is_honoured_at_once(cluster):
    cluster.call(cluster.target.stop())
    with gateway_process(cluster) as gateway:
        gateway.until(lambda: gateway.gateway_line()["stage"] == "connect")
        started = time.monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        said = gateway.end()
        assert time.monotonic() - started < 5
        assert gateway.process.returncode == 0
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--nonsense", "1"], {}, "nonsense"),
        ([], {"OUTRIDER_NONSENSE": "1"}, "OUTRIDER_NONSENSE"),
        ([], {"OUTRIDER_INJECT_FAULT": "gateway:nowhere:raise"}, "nowhere"),
    ],
)
def test_a_wrong_flag_or_variable_is_an_error_that_names_it(arguments, variables, words):
    result = subprocess.run(
        [sys.executable, "-m", "gateway", *arguments],
        capture_output=True, text=True, timeout=20, check=False,
        env={**os.environ, **variables},
    )  # fmt: skip
    assert result.returncode != 0
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("flag", ["--port", "--rest-port"])
def test_a_port_that_is_taken_is_named(flag):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = str(listener.getsockname()[1])
        other = "--rest-port" if flag == "--port" else "--port"
        result = subprocess.run(
            [sys.executable, "-m", "gateway", flag, taken, other, "0"],
            capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
    assert result.returncode != 0
    assert f"cannot listen on 127.0.0.1:{taken}" in result.stderr
