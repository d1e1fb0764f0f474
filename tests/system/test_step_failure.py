"""A step that raises under running streams: health goes first, and no client waits for ever."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cluster import Cluster, running_cluster
from outrider.v1 import generation_pb2, generation_pb2_grpc

# The canary takes some hundred steps; the failure comes while the clients' streams run.
FAULT = "target:step:raise@400"


def watch_health(address: str, changes: list[tuple[float, int]]) -> None:
    """Notes every health status with its time until the service is gone."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            for response in health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest()
            ):
                changes.append((time.monotonic(), response.status))
        except grpc.RpcError:
            return


def sse_stream(cluster: Cluster) -> tuple[float, str]:
    """Time and text of the last event of a stream that runs into the failure."""
    last = ""
    with httpx.stream(
        "POST",
        f"{cluster.url}/v1/completions",
        json={"model": cluster.model, "prompt": "a", "max_tokens": 6000,
              "temperature": 0, "ignore_eos": True, "stream": True},
        timeout=30,
        trust_env=False,
    ) as response:  # fmt: skip
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = line.removeprefix("data: ")
    return time.monotonic(), last


def grpc_stream(address: str) -> grpc.StatusCode:
    """How a gRPC stream ends that runs into the failure."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(prompt="a", max_tokens=6000, ignore_eos=True)
        try:
            for _ in stub.Generate(request, timeout=30):
                pass
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
    return grpc.StatusCode.OK


def test_health_goes_first_and_every_client_is_told(tiny_model: Path) -> None:
    with running_cluster(
        "--model",
        str(tiny_model),
        "--draft",
        "ngram",
        OUTRIDER_INJECT_FAULT=FAULT,
        OUTRIDER_MAX_REPLAYS="0",
    ) as cluster:
        details = cluster.get("/status").json()["details"]
        address = "127.0.0.1:" + details["target"]["configuration"]["port"]
        gateway = "127.0.0.1:" + details["gateway"]["configuration"]["port"]
        changes: list[tuple[float, int]] = []
        watcher = threading.Thread(target=watch_health, args=(address, changes))
        watcher.start()
        gateway_changes: list[tuple[float, int]] = []
        gateway_watcher = threading.Thread(target=watch_health, args=(gateway, gateway_changes))
        gateway_watcher.start()
        with ThreadPoolExecutor(5) as pool:
            streams = [pool.submit(sse_stream, cluster) for _ in range(4)]
            call = pool.submit(grpc_stream, gateway)
            ends = [stream.result(timeout=40) for stream in streams]
            assert call.result(timeout=40) == grpc.StatusCode.UNAVAILABLE
        watcher.join(10)
        statuses = [status for _, status in changes]
        assert statuses == [
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        ]
        for ended, last in ends:
            assert "error" in last
            assert "step" in last
            # Two threads of this test saw the two; the health is set before the streams are told.
            assert changes[-1][0] <= ended + 0.25
        assert any("injected fault at target:step" in line for line in cluster.errors)
        # It is started again, and fails again only after as many steps.
        deadline = time.monotonic() + 60
        while cluster.get("/readyz").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    gateway_watcher.join(10)
    serving, lost, back, *_ = [status for _, status in gateway_changes]
    assert serving == back == health_pb2.HealthCheckResponse.SERVING
    assert lost == health_pb2.HealthCheckResponse.NOT_SERVING
