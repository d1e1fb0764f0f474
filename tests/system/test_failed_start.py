"""The second promise: a service that fails on the way is not addressed, and says where and why."""

import itertools
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.cluster import Cluster
from bench.truncate import truncate
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.stages import ENGINE_STAGES, GATEWAY_STAGES, NGRAM_STAGES

ACTIONS = ("raise", "hang", "exit")
EXIT_TIMEOUT_SECONDS = 60

# Everything that can fail, by service; the last ones fail in a process that is SERVING already.
POINTS = [
    *(("target", stage) for stage in ENGINE_STAGES),
    *(("draft", stage) for stage in NGRAM_STAGES),
    *(("gateway", stage) for stage in GATEWAY_STAGES),
    ("target", "step"),
    ("target", "verify"),
    ("draft", "propose"),
]
# One of each kind, for every day.
SOME = {
    ("target", "weights", "raise"),
    ("target", "graphs", "raise"),
    ("target", "attention", "hang"),
    ("target", "first_decode", "exit"),
    ("draft", "first_decode", "exit"),
    ("gateway", "canary", "raise"),
    ("gateway", "tokenizer", "hang"),
    ("target", "step", "hang"),
    ("target", "verify", "exit"),
    ("draft", "propose", "raise"),
}
FAULTS = [
    pytest.param(
        service, point, action,
        marks=[] if (service, point, action) in SOME else [pytest.mark.full],
        id=f"{service}-{point}-{action}",
    )
    for (service, point), action in itertools.product(POINTS, ACTIONS)
]  # fmt: skip


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's first layer: a second to load."""
    path = tmp_path_factory.mktemp("tiny") / "first-layer.gguf"
    truncate(resolve_model(DEFAULT_MODEL).path, path, 1)
    return path


def start(model: Path, fault: str, *flags: str) -> Cluster:
    return Cluster(
        ["--model", str(model), "--draft", "ngram", "--speculation", "fixed", *flags],
        {
            "OUTRIDER_INJECT_FAULT": fault,
            "OUTRIDER_STARTUP_TIMEOUT": "6",
            "OUTRIDER_STEP_TIMEOUT": "4",
        },
    )


@pytest.mark.parametrize(("service", "point", "action"), FAULTS)
def test_up_ends_with_service_stage_and_reason(
    tiny_model: Path, service: str, point: str, action: str
) -> None:
    cluster = start(tiny_model, f"{service}:{point}:{action}")
    code = cluster.process.wait(EXIT_TIMEOUT_SECONDS)
    cluster.stop()
    assert code not in (0, None)
    assert not any(line.startswith("ready") for line in cluster.output)
    last = cluster.errors[-1]
    assert service in last
    assert point in last
    if point in ("step", "verify", "propose") and action == "exit":
        assert "exit" in last


def readiness(url: str) -> tuple[int, dict[str, Any]]:
    response = httpx.get(f"{url}/readyz", timeout=5, trust_env=False)
    return response.status_code, response.json()


@pytest.mark.parametrize(
    ("service", "point", "action"),
    [
        ("target", "kv_cache", "raise"),
        ("draft", "config", "exit"),
        ("gateway", "connect", "raise"),
        pytest.param("target", "verify", "raise", marks=pytest.mark.full),
        pytest.param("draft", "propose", "hang", marks=pytest.mark.full),
        pytest.param("gateway", "canary", "hang", marks=pytest.mark.full),
    ],
)
def test_held_up_it_explains_itself_and_admits_nothing(
    tiny_model: Path, service: str, point: str, action: str, unused_tcp_port: int
) -> None:
    cluster = start(
        tiny_model, f"{service}:{point}:{action}", "--on-startup-failure", "hold",
        "--rest-port", str(unused_tcp_port),
    )  # fmt: skip
    url = f"http://127.0.0.1:{unused_tcp_port}"
    try:
        deadline = time.monotonic() + EXIT_TIMEOUT_SECONDS
        words = ""
        while point not in words:
            assert time.monotonic() < deadline, f"{words}\n" + "\n".join(cluster.errors)
            time.sleep(0.2)
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
    finally:
        cluster.stop()
    assert not any(line.startswith("ready") for line in cluster.output)
