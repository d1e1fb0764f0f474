"""Loss and return of peers after start-up, as operators and clients see them."""

import json
import time

import grpc
import httpx
import openai
import pytest
from readiness_support import (
    CHAT,
    CLOSED,
    OPEN,
    Reader,
    restart,
)

from outrider.v1 import generation_pb2, generation_pb2_grpc


def test_without_replays_a_target_that_fails_ends_streams_with_an_error_event(cluster):
    cluster.start_gateway(max_replays=0)
    cluster.wait_ready()
    cluster.model.step_seconds = 0.01
    reader = Reader(cluster)
    cluster.do(lambda: cluster.target_status.fail("step", "index out of range"))
    reader.join(10)
    assert not reader.is_alive()
    assert reader.events[-1] == "[DONE]"
    error = json.loads(reader.events[-2])["error"]
    assert "FAILED in stage step: index out of range" in error["message"]
    assert error["code"] == "not_ready"
    status, _ = cluster.readyz()
    line = cluster.service_line("target")
    assert status == 503
    assert (line["state"], line["stage"], line["reason"]) == (
        "FAILED", "step", "index out of range",
    )  # fmt: skip
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 503


def test_a_stream_that_breaks_raises_in_the_openai_package_and_in_grpc(cluster):
    cluster.start_gateway(max_replays=0)
    cluster.wait_ready()
    cluster.model.step_seconds = 0.01
    http_client = httpx.Client(trust_env=False)
    with (
        openai.OpenAI(
            base_url=f"{cluster.url}/v1", api_key="x", max_retries=0, http_client=http_client
        ) as client,
        grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel,
    ):
        pieces = iter(client.chat.completions.create(**{**CHAT, "max_tokens": 450}, stream=True))
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            generation_pb2.GenerateRequest(prompt="Hi", request_id="mine")
        )
        next(pieces)
        next(call)
        cluster.do(lambda: cluster.target_status.fail("step", "index out of range"))
        with pytest.raises(openai.APIError, match="index out of range"):
            list(pieces)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "request mine: " in caught.value.details()
    assert "FAILED in stage step: index out of range" in caught.value.details()


def test_a_target_that_reports_nonsense_is_dropped_with_the_reason(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.model.script = [10**6]
    response = cluster.client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert "token_ids holds" in response.json()["error"]["message"]
    assert "given up after 3 replays" in response.json()["error"]["message"]
    cluster.model.script = None
    cluster.wait_ready()
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_killed_target_is_replaced_after_handshake_and_canary(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.call(cluster.target.stop())
    cluster.until(lambda: cluster.service_line("target")["state"] == "GONE")
    assert cluster.readyz()[0] == 503
    admitted = len(cluster.model.admitted)
    cluster.do(cluster.target.new_process)
    cluster.call(cluster.target.start())
    cluster.wait_ready()
    lengths = {
        admit.speculation.draft_length
        for batch in cluster.model.admitted[admitted:]
        for admit in batch.sequences
    }
    assert lengths == {0, 5}
    assert cluster.readyz()[1]["degraded"] is False
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_target_that_comes_back_with_another_model_is_not_used(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.call(cluster.target.stop())
    cluster.model.info.identity.tokenizer_sha256 = "ff"
    cluster.do(cluster.target.new_process)
    cluster.call(cluster.target.start())
    cluster.until(lambda: cluster.service_line("gateway")["stage"] == "handshake")
    cluster.until(lambda: "tokenizer_sha256" in cluster.service_line("gateway")["reason"])
    assert cluster.readyz()[0] == 503
    response = cluster.client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 503
    assert "tokenizer_sha256" in response.json()["error"]["message"]


def test_a_lost_draft_degrades_and_a_new_one_is_checked_before_that_ends(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.call(cluster.draft.stop())
    cluster.until(lambda: cluster.readyz()[1]["degraded"])
    assert cluster.readyz()[0] == 200
    assert cluster.service_line("draft")["state"] == "GONE"
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
    admitted = len(cluster.model.admitted)
    cluster.do(cluster.draft.new_process)
    cluster.call(cluster.draft.start())
    # The target's link is still to the process that is gone.
    cluster.until(lambda: "another draft process" in cluster.service_line("draft")["reason"])
    assert len(cluster.model.admitted) == admitted
    cluster.link(CLOSED)
    cluster.until(lambda: not cluster.readyz()[1]["degraded"])
    assert len(cluster.model.admitted) > admitted
    assert cluster.client.get("/status").json()["connection"]["draft_problem"] is None


def test_with_require_draft_a_lost_draft_is_not_ready(cluster):
    cluster.start_gateway(require_draft=True)
    cluster.wait_ready()
    cluster.call(cluster.draft.stop())
    cluster.until(lambda: cluster.readyz()[0] == 503)
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 503
    cluster.call(cluster.draft.start())
    cluster.wait_ready()


def test_an_open_circuit_degrades_and_says_why(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.link(OPEN, "3 drafts late")
    cluster.until(lambda: cluster.readyz()[1]["degraded"])
    assert "OPEN_CIRCUIT: 3 drafts late" in cluster.service_line("draft")["reason"]
    cluster.link(CLOSED)
    cluster.until(lambda: not cluster.readyz()[1]["degraded"])


def test_a_new_draft_that_changes_tokens_switches_speculation_off_until_it_does_not(cluster):
    cluster.start_gateway(speculation="fixed")
    cluster.wait_ready()
    cluster.model.lies_with_drafts_at = 7
    restart(cluster, cluster.draft)
    cluster.link(CLOSED)
    cluster.until(lambda: len(cluster.model.policies) == 2)
    assert not cluster.model.policies[-1].rules
    status, body = cluster.readyz()
    assert status == 200 and body["degraded"]
    assert "token 7" in cluster.service_line("draft")["reason"]
    reasons = cluster.client.get("/status").json()["speculation"]["reasons"]
    assert "drafts change tokens" in reasons[0]
    cluster.model.lies_with_drafts_at = None
    cluster.until(lambda: not cluster.readyz()[1]["degraded"])
    assert cluster.model.policies[-1].rules


def test_a_target_that_hangs_is_noticed_by_its_silence(cluster):
    cluster.start_gateway(peer_timeout=0.3, max_replays=0)
    cluster.wait_ready()
    cluster.model.step_seconds = 0.01
    reader = Reader(cluster)
    cluster.target_status.is_hanging = True
    cluster.model.is_stalled = True
    reader.join(10)
    assert not reader.is_alive()
    assert "error" in json.loads(reader.events[-2])
    assert cluster.service_line("target")["state"] == "NO_ANSWER"
    cluster.target_status.is_hanging = False
    cluster.model.is_stalled = False
    cluster.wait_ready()


def test_a_target_too_busy_to_answer_that_goes_on_decoding_is_not_lost(cluster):
    cluster.start_gateway(peer_timeout=0.3)
    cluster.wait_ready()
    cluster.model.step_seconds = 0.02
    reader = Reader(cluster)
    cluster.target_status.is_hanging = True
    cluster.until(lambda: cluster.service_line("target")["state"] == "NO_ANSWER")
    assert cluster.readyz()[0] == 503
    seen = len(reader.events)
    time.sleep(0.5)
    assert reader.is_alive() and len(reader.events) > seen
    cluster.target_status.is_hanging = False
    cluster.model.step_seconds = 0.0
    reader.join(10)
    assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
    cluster.wait_ready()


def test_a_draining_gateway_takes_nothing_new_and_finishes_what_runs(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.model.step_seconds = 0.002
    reader = Reader(cluster)
    cluster.lifecycle.drain()
    assert cluster.readyz()[0] == 503
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 503
    cluster.call(cluster.service.drain(20))
    reader.join(5)
    assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"


def test_a_stopped_gateway_ends_running_answers_with_an_error(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.model.step_seconds = 0.05
    reader = Reader(cluster)
    cluster.call(cluster.service.drain(0.1))
    cluster.call(cluster.service.stop())
    reader.join(5)
    assert "error" in json.loads(reader.events[-2])
