"""The second promise: a service that fails on the way is not addressed, and says where and why."""

import itertools
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.cluster import Cluster
from outrider.serving.model_source import DEFAULT_MODEL
from outrider.serving.stages import ENGINE_STAGES, GATEWAY_STAGES, NGRAM_STAGES

MODULES = {"target_service": "target", "draft_service": "draft", "gateway": "gateway"}
ACTIONS = ("raise", "hang", "exit")
EXIT_TIMEOUT_SECONDS = 60

# Everything that can fail, by drafter and service; the last ones fail in a process that is SERVING
# already.
POINTS = [
    *(("ngram", "target", stage) for stage in ENGINE_STAGES),
    *(("ngram", "draft", stage) for stage in NGRAM_STAGES),
    *(("standalone", "draft", stage) for stage in ENGINE_STAGES),
    *(("auto", "draft", stage) for stage in ENGINE_STAGES),
    *(("ngram", "gateway", stage) for stage in GATEWAY_STAGES),
    ("ngram", "target", "step"),
    ("ngram", "target", "verify"),
    ("ngram", "draft", "propose"),
]
AFTER_SERVING = ("step", "verify", "propose")
# One of each kind, for every day.
SOME = {
    ("ngram", "target", "graphs", "raise"),
    ("ngram", "target", "attention", "hang"),
    ("ngram", "draft", "first_decode", "exit"),
    ("standalone", "draft", "kv_cache", "raise"),
    ("ngram", "gateway", "canary", "raise"),
    ("ngram", "target", "step", "hang"),
    ("ngram", "draft", "propose", "raise"),
}
SOME_HELD = {
    ("ngram", "target", "kv_cache", "raise"),
    ("ngram", "gateway", "connect", "raise"),
}


def faults(some: set[tuple[str, str, str, str]]) -> list[Any]:
    """Every point with every action; those that are not among `some` are for the long run."""
    return [
        pytest.param(
            *point, action,
            marks=[] if (*point, action) in some else [pytest.mark.full],
            id="-".join((*point, action)),
        )
        for point, action in itertools.product(POINTS, ACTIONS)
    ]  # fmt: skip


def start(model: Path, drafter: str, fault: str, *flags: str) -> Cluster:
    draft_model = ("--draft-model", str(model)) if drafter == "standalone" else ()
    # The head that ships fits the default model alone.
    target = () if drafter == "auto" else ("--model", str(model))
    return Cluster(
        [*target, "--draft", drafter, *draft_model, "--speculation", "fixed", *flags],
        {
            "OUTRIDER_INJECT_FAULT": fault,
            # Short only where something hangs: on a busy machine other stages take their time.
            "OUTRIDER_STARTUP_TIMEOUT": "12" if "hang" in fault or "delay" in fault else "60",
            "OUTRIDER_STEP_TIMEOUT": "4",
        },
    )  # fmt: skip


@pytest.mark.parametrize(("drafter", "service", "point", "action"), faults(SOME))
def test_up_ends_with_service_stage_and_reason(
    tiny_model: Path, drafter: str, service: str, point: str, action: str
) -> None:
    cluster = start(tiny_model, drafter, f"{service}:{point}:{action}")
    code = cluster.process.wait(EXIT_TIMEOUT_SECONDS)
    cluster.stop()
    assert code not in (0, None)
    assert not any(line.startswith("ready") for line in cluster.output)
    last = cluster.errors[-1]
    assert service in last
    assert point in last
    reason = {"raise": "injected fault", "hang": "not finished after", "exit": "exit code 70"}
    assert reason[action] in last


class Watcher:
    """A client that watches a service's health from before its port is open."""

    def __init__(self, address: str) -> None:
        self.statuses: set[int] = set()
        self._channel = grpc.insecure_channel(
            address,
            options=[("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 100)],
        )
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        call = health_pb2_grpc.HealthStub(self._channel).Watch(
            health_pb2.HealthCheckRequest(), wait_for_ready=True
        )
        try:
            for response in call:
                self.statuses.add(response.status)
        except (grpc.RpcError, ValueError):
            return

    def close(self) -> None:
        self._channel.close()
        self._thread.join(10)


def addresses(cluster: Cluster) -> dict[str, str]:
    """Where each service was told to listen, by the command lines of the children."""
    found = {}
    children = subprocess.run(
        ["ps", "-ww", "--ppid", str(cluster.process.pid), "-o", "args="],
        capture_output=True, text=True, check=False,
    ).stdout.splitlines()  # fmt: skip
    for line in children:
        words = line.split()
        for module, service in MODULES.items():
            if module in words:
                (port,) = [word for word in words if word.startswith("--port=")]
                found[service] = f"127.0.0.1:{port.removeprefix('--port=')}"
    return found


def readiness(url: str) -> tuple[int, dict[str, Any]]:
    response = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    return response.status_code, response.json()


@pytest.mark.parametrize(("drafter", "service", "point", "action"), faults(SOME_HELD))
def test_held_up_it_explains_itself_and_admits_nothing(
    tiny_model: Path, drafter: str, service: str, point: str, action: str, unused_tcp_port: int
) -> None:
    if (service, action) == ("gateway", "exit"):
        pytest.skip("a gateway that is gone cannot explain itself; `outrider up` does")
    cluster = start(
        tiny_model, drafter, f"{service}:{point}:{action}", "--on-startup-failure", "hold",
        "--rest-port", str(unused_tcp_port),
    )  # fmt: skip
    url = f"http://127.0.0.1:{unused_tcp_port}"
    watchers: dict[str, Watcher] = {}
    try:
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        words = ""
        while point not in words:
            assert time.monotonic() < deadline, f"{words}\n" + "\n".join(cluster.errors)
            time.sleep(0.1)
            for name, address in addresses(cluster).items():
                if name not in watchers:
                    watchers[name] = Watcher(address)
            try:
                status, page = readiness(url)
            except httpx.TransportError:
                continue
            assert status == 503
            words = " ".join(
                f"{entry['state']} {entry['stage']} {entry['reason']}"
                for entry in page["services"]
                if entry["service"] == service and entry["state"] in ("FAILED", "GONE")
            )
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": DEFAULT_MODEL, "prompt": "a", "max_tokens": 1},
            timeout=5,
            trust_env=False,
        )
        assert answer.status_code == 503
        assert "Retry-After" in answer.headers
        assert answer.json()["error"]["message"]
        assert cluster.process.poll() is None
        if point not in AFTER_SERVING:
            assert health_pb2.HealthCheckResponse.SERVING not in watchers[service].statuses
        assert health_pb2.HealthCheckResponse.SERVING not in watchers["gateway"].statuses
    finally:
        for watcher in watchers.values():
            watcher.close()
        cluster.stop()
    assert not any(line.startswith("ready") for line in cluster.output)


@pytest.mark.full
def test_a_slow_start_is_no_failure_while_every_stage_keeps_its_time(tiny_model: Path) -> None:
    # Together the stages take longer than any one of them may, the gateway's waiting included.
    fault = "target:weights:delay=7,target:kv_cache:delay=7"
    cluster = start(tiny_model, "ngram", fault)
    try:
        assert cluster.wait_ready().get("/readyz").status_code == 200
    finally:
        assert cluster.stop() == 0
