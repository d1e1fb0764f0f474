"""`outrider status` against a gateway's /status that is laid down."""

import json
from typing import Any

import pytest
from rest_server import RestServer

from outrider.cli.status import print_status


def details(service: str, **changes: Any) -> dict[str, Any]:
    return {
        "service": service,
        "state": "SERVING",
        "stages": [
            {"name": "config", "state": "DONE", "seconds": 0.25, "detail": "a [detail]"},
            {"name": "graphs", "state": "SKIPPED", "seconds": 0.0, "detail": "on CPU"},
            {"name": "first_decode", "state": "PENDING", "seconds": 0.0, "detail": ""},
        ],
        "failure": None,
        "version": "1.2.3",
        "process_id": 4321,
        "uptime_seconds": 12.4,
        "device": "cpu",
        "gpu": None,
        "links": [],
        **changes,
    }


LINK = {
    "address": "127.0.0.1:50052",
    "state": "CLOSED_CIRCUIT",
    "reason": "",
    "drafter": "ngram",
    "round_trip_p50_seconds": 0.0005,
    "round_trip_p95_seconds": 0.002,
    "feature_transport": "none",
    "feature_layer_ids": [],
    "alert": "",
}


def view(service: str, state: str = "SERVING", stage: str = "", reason: str = "") -> dict[str, Any]:
    return {"service": service, "state": state, "stage": stage, "reason": reason}


def page(*services: dict[str, Any], ready: bool, degraded: bool = False) -> dict[str, Any]:
    return {
        "ready": ready,
        "degraded": degraded,
        "services": list(services),
        "details": {
            "gateway": details("gateway"),
            "target": details("target", links=[LINK]),
        },
    }


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def status_of(body: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with RestServer({"/status": (200, json.dumps(body))}) as rest:
        code = print_status(rest.url)
    return code, capsys.readouterr().out


def test_a_ready_server_is_told_with_services_stages_and_links(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, output = status_of(page(view("gateway"), view("target"), ready=True), capsys)
    assert code == 0
    assert "is ready" in output
    lines = [line.split() for line in output.splitlines()]
    assert ["target", "SERVING", "4321", "12", "s", "cpu", "1.2.3"] in lines
    assert ["target", "config", "done", "0.25", "a", "[detail]"] in lines
    assert ["target", "graphs", "skipped", "0.00", "on", "CPU"] in lines
    assert ["target", "first_decode", "pending"] in lines
    link = ["127.0.0.1:50052", "CLOSED_CIRCUIT", "ngram", "0.50", "ms", "2.00", "ms", "none"]
    assert link in lines


def test_a_service_on_a_gpu_is_told_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = {
        "name": "NVIDIA H200",
        "driver_version": "580.159",
        "memory_used_bytes": 21 * 2**29,
        "memory_total_bytes": 140 * 2**30,
        "utilization": 0.43,
        "power_watts": None,
    }
    body = page(view("gateway"), view("target"), ready=True)
    body["details"]["target"] = details("target", device="cuda:0", gpu=gpu)
    _, output = status_of(body, capsys)
    line = next(line for line in output.splitlines() if line.startswith("target"))
    assert "cuda:0, NVIDIA H200, 10.5 of 140 GiB in use, 43% busy  " in line


def test_a_failed_service_is_told_with_its_reason_and_a_non_zero_exit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failed = view("draft", "FAILED", "weights", "tensor [x] is\nmissing")
    code, output = status_of(page(view("gateway"), failed, ready=False), capsys)
    assert code == 1
    assert "is not ready" in output
    line = next(line for line in output.splitlines() if line.startswith("draft"))
    assert line.split() == ["draft", "FAILED", "weights", "tensor", "[x]", "is", "missing"]


def test_a_server_without_its_draft_is_ready_and_said_to_be_degraded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, output = status_of(page(view("gateway"), ready=True, degraded=True), capsys)
    assert code == 0
    assert "degraded" in output


def test_where_nothing_listens_that_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with RestServer({}) as rest:
        url = rest.url
    assert print_status(url) == 1
    assert f"nothing answers at {url}" in capsys.readouterr().err


def test_another_server_than_a_gateway_is_said_to_be_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RestServer({"/status": (404, "not here")}) as rest:
        assert print_status(rest.url) == 1
    assert "answered 404: not here" in capsys.readouterr().err
