"""Sequences that the target has and does nothing for: they are reported, and that is all."""

import threading
import time

import pytest
from readiness_support import CHAT

from gateway.stalls import ProgressWatch

LIMIT = 0.3
STEP_SECONDS = 0.02
BODY = {**CHAT, "max_tokens": 40, "ignore_eos": True, "speculation": {"draft_length": 0}}


@pytest.fixture
def answering(cluster):
    """Starts a request; its status code is there once the target went on."""
    cluster.start_gateway(stall_timeout=LIMIT)
    cluster.wait_ready()
    cluster.model.step_seconds = STEP_SECONDS
    codes: list[int] = []

    def ask() -> None:
        codes.append(cluster.client.post("/v1/chat/completions", json=BODY).status_code)

    thread = threading.Thread(target=ask)
    yield cluster, thread
    cluster.model.is_stalled = cluster.model.is_prefilling = False
    thread.join()
    assert codes == [200]
    assert stalled(cluster) == [] and gauge(cluster) == "0.0"


def stalled(cluster) -> list[dict]:
    code, page = cluster.readyz()
    assert code == 200 and page["ready"]
    assert cluster.client.get("/livez").status_code == 200
    return page["stalled_sequences"]


def gauge(cluster) -> str:
    lines = cluster.client.get("/metrics").text.splitlines()
    return next(line for line in lines if line.startswith("outrider_stalled_sequences ")).split()[1]


@pytest.mark.parametrize(("wait_seconds", "stage"), [(0.0, "prefill"), (0.2, "decode")])
def test_a_target_that_reports_nothing_is_told_of(answering, wait_seconds, stage):
    cluster, thread = answering
    cluster.model.is_stalled = wait_seconds == 0
    thread.start()
    time.sleep(wait_seconds)
    cluster.model.is_stalled = True
    assert stalled(cluster) == []
    cluster.until(lambda: len(stalled(cluster)) == 1)
    (one,) = stalled(cluster)
    assert one["stage"] == stage and one["seconds"] >= LIMIT
    assert one["request_id"].startswith("chatcmpl-")
    assert cluster.client.get("/status").json()["stalled_sequences"][0]["stage"] == stage
    assert gauge(cluster) == "1.0"


def test_a_long_prefill_is_progress(answering):
    cluster, thread = answering
    cluster.model.is_prefilling = True
    thread.start()
    end = time.monotonic() + 4 * LIMIT
    while time.monotonic() < end:
        assert stalled(cluster) == []
        time.sleep(STEP_SECONDS)


def test_decode_steps_of_others_are_progress_only_before_the_first_token():
    watch = ProgressWatch(10.0)
    running = {1: Named("begun"), 2: Named("queued")}
    for sequence_id in running:
        watch.admitted(sequence_id, 0.0)
    watch.emitted(1, 1.0)
    watch.stepped(9.0, has_prefill=False)
    assert [one.request_id for one in watch.stalled(running, 12.0)] == ["begun"]
    watch.stepped(12.0, has_prefill=True)
    assert watch.stalled(running, 12.0) == []
    assert [one.stage for one in watch.stalled(running, 22.0)] == ["decode", "prefill"]
    assert ProgressWatch(0.0).stalled(running, 99.0) == []


class Named:
    """As much of a sequence as is read."""

    def __init__(self, request_id: str) -> None:
        self.request = self
        self.request_id = request_id
