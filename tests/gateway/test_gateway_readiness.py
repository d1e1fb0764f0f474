"""Start-up, loss and return of peers, as an operator and a client see them."""

import json
import threading
import time

import grpc
import httpx
import openai
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc, status_pb2, target_pb2

CHAT = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
}
REFUSED = status_pb2.LINK_STATE_REFUSED
OPEN = status_pb2.LINK_STATE_OPEN_CIRCUIT
CLOSED = status_pb2.LINK_STATE_CLOSED_CIRCUIT


def loading(stage: str):
    def change(message: status_pb2.ServiceStatus) -> None:
        message.state = status_pb2.SERVICE_STATE_LOADING
        message.stages.add(name=stage, state=status_pb2.STAGE_STATE_RUNNING, detail="shard 3 of 9")

    return change


def serving(message: status_pb2.ServiceStatus) -> None:
    message.state = status_pb2.SERVICE_STATE_SERVING
    del message.stages[:]


def failed_words(cluster) -> str:
    cluster.until(lambda: cluster.service_line("gateway")["state"] == "FAILED")
    line = cluster.service_line("gateway")
    return f"{line['stage']}: {line['reason']}"


def restart(cluster, peer) -> None:
    """The peer's process is killed and another one starts at the same address."""
    cluster.call(peer.stop())
    cluster.do(peer.new_process)
    cluster.call(peer.start())


class Reader(threading.Thread):
    """A client in the middle of a long stream."""

    def __init__(self, cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.events: list[str] = []
        self.start()
        cluster.until(lambda: len(self.events) > 2)

    def run(self) -> None:
        body = {**CHAT, "max_tokens": 450, "stream": True, "speculation": {"draft_length": 0}}
        with self.cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))


def test_the_port_answers_from_the_first_moment_and_says_what_is_loading(cluster):
    cluster.do(lambda: cluster.target_status.set(loading("weights")))
    cluster.start_gateway()
    assert cluster.client.get("/livez").status_code == 200
    cluster.until(lambda: cluster.service_line("gateway")["stage"] == "connect")
    cluster.until(lambda: cluster.service_line("target")["stage"] == "weights")
    status, body = cluster.readyz()
    assert status == 503 and body["ready"] is False
    line = cluster.service_line("target")
    assert (line["state"], line["reason"]) == ("LOADING", "shard 3 of 9")
    assert "LOADING in stage weights" in cluster.service_line("gateway")["reason"]
    assert cluster.client.get("/health").json() == cluster.client.get("/readyz").json()
    for path, payload in (("/v1/chat/completions", CHAT), ("/v1/completions", {"x": 1})):
        response = cluster.client.post(path, json=payload)
        assert response.status_code == 503
        assert int(response.headers["retry-after"]) >= 1
        assert "gateway" in response.json()["error"]["message"]
    assert cluster.client.get("/v1/models").status_code == 503
    assert cluster.model.admitted == []
    cluster.do(lambda: cluster.target_status.set(serving))
    cluster.wait_ready()


def test_a_draft_that_is_still_loading_keeps_the_gateway_from_being_ready(cluster):
    cluster.do(lambda: cluster.draft_status.set(loading("weights")))
    cluster.start_gateway()
    cluster.until(lambda: "draft: LOADING" in cluster.service_line("gateway")["reason"])
    assert cluster.readyz()[0] == 503
    cluster.do(lambda: cluster.draft_status.set(serving))
    cluster.wait_ready()


def test_what_a_dead_service_said_last_is_kept_and_shown(cluster):
    cluster.do(lambda: cluster.target_status.set(loading("weights")))
    cluster.start_gateway()
    cluster.until(lambda: cluster.service_line("target")["state"] == "LOADING")
    cluster.call(cluster.target.stop())
    cluster.until(lambda: cluster.service_line("target")["state"] == "GONE")
    line = cluster.service_line("target")
    assert line["stage"] == "weights"
    assert line["reason"].startswith("gone; last known: LOADING in stage weights")


def test_a_service_that_was_never_there_is_unreachable(cluster):
    cluster.call(cluster.draft.stop())
    cluster.start_gateway()
    cluster.until(lambda: "UNAVAILABLE" in cluster.service_line("draft")["reason"])
    assert cluster.service_line("draft")["state"] == "UNREACHABLE"
    cluster.call(cluster.draft.start())
    cluster.wait_ready()


def test_a_start_up_that_takes_too_long_names_stage_and_peer(cluster):
    cluster.do(lambda: cluster.draft_status.fail("weights", "no such file"))
    cluster.start_gateway(startup_timeout=1.0)
    cluster.until(lambda: "FAILED in stage weights" in cluster.service_line("gateway")["reason"])
    time.sleep(1)
    cluster.lifecycle.check_timeouts()
    words = failed_words(cluster)
    assert words.startswith("connect: ")
    assert "draft: FAILED in stage weights: no such file" in words


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda info: setattr(info, "name", "another"), "name"),
        (lambda info: setattr(info.identity, "vocab_size", 7), "identity.vocab_size"),
        (
            lambda info: setattr(info.identity, "tokenizer_sha256", "ff"),
            "identity.tokenizer_sha256",
        ),
        (lambda info: info.identity.eos_token_ids.append(9), "identity.eos_token_ids"),
    ],
)
def test_a_target_with_another_model_fails_the_handshake_by_field(cluster, change, field):
    change(cluster.model.info)
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("handshake: ModelMismatch: " + field)
    assert cluster.model.admitted == []


def test_a_refused_link_fails_the_handshake_with_its_reason(cluster):
    cluster.link(REFUSED, "identity.tokenizer_sha256: target has aa, draft has bb")
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("handshake: ")
    assert "REFUSED: identity.tokenizer_sha256: target has aa, draft has bb" in words


def test_the_handshake_waits_until_the_link_is_in_use(cluster):
    cluster.link(status_pb2.LINK_STATE_CONNECTING)
    cluster.start_gateway()
    cluster.until(lambda: "CONNECTING" in cluster.service_line("gateway")["reason"])
    assert cluster.readyz()[0] == 503
    cluster.link(CLOSED)
    cluster.wait_ready()


def test_the_canary_goes_through_decode_with_drafts_and_without(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    assert cluster.model.kinds[:3] == ["attach", "policy", "admit"]
    admits = [admit for batch in cluster.model.admitted for admit in batch.sequences]
    lengths = [(admit.sampling.temperature, admit.speculation.draft_length) for admit in admits]
    assert sorted(lengths) == [(0.0, 0), (0.0, 5), (0.8, 0), (0.8, 5)]
    assert all(admit.max_tokens <= 64 for admit in admits)
    stages = cluster.client.get("/status").json()["details"]["gateway"]["stages"]
    assert [stage["name"] for stage in stages] == [
        "config", "tokenizer", "connect", "handshake", "canary",
    ]  # fmt: skip
    assert "draft tokens accepted" in stages[-1]["detail"]


def test_with_a_threshold_of_one_row_drafted_canaries_run_one_after_the_other(cluster):
    cluster.model.step_seconds = 0.01
    cluster.start_gateway(speculative_disable_batch_threshold=1)
    cluster.wait_ready()
    assert cluster.model.policies[0].max_decode_rows == 1
    kinds = [
        (kind, admit.speculation.draft_length)
        for kind, batch in zip(
            [kind for kind in cluster.model.kinds if kind == "admit"],
            cluster.model.admitted,
            strict=True,
        )
        for admit in batch.sequences
    ]
    assert [length for _, length in kinds] == [0, 0, 5, 5]
    assert cluster.model.most_drafting == 1


def test_without_a_draft_service_only_plain_canaries_run_and_nothing_is_degraded(cluster):
    cluster.start_gateway(draft_address="")
    cluster.wait_ready()
    admits = [admit for batch in cluster.model.admitted for admit in batch.sequences]
    assert {admit.speculation.draft_length for admit in admits} == {0}
    body = cluster.readyz()[1]
    assert body["degraded"] is False
    assert [line["service"] for line in body["services"]] == ["gateway", "target"]
    assert cluster.model.policies == [target_pb2.SpeculationPolicy()]


def test_drafts_that_change_a_token_fail_the_canary(cluster):
    cluster.model.lies_with_drafts = True
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("canary: TokensDiffer: ")
    assert "token 7" in words


def test_a_canary_without_an_accepted_token_fails_or_warns(cluster, caplog):
    cluster.model.accepts = False
    cluster.start_gateway()
    words = failed_words(cluster)
    assert words.startswith("canary: CanaryFailed: no draft token was accepted")


def test_a_missing_acceptance_is_only_a_warning_where_that_is_wanted(cluster, caplog):
    cluster.model.accepts = False
    cluster.start_gateway(canary_acceptance="warn")
    cluster.wait_ready()
    assert any(
        record.levelname == "WARNING" and "no draft token was accepted" in record.getMessage()
        for record in caplog.records
    )
    assert cluster.readyz()[1]["degraded"] is False


def test_a_draft_that_fails_during_the_canary_is_named_with_stage_and_reason(cluster):
    cluster.model.accepts = False

    def proposing(message: status_pb2.ServiceStatus) -> None:
        message.stages.add(name="propose", state=status_pb2.STAGE_STATE_RUNNING)

    cluster.do(lambda: cluster.draft_status.set(proposing))
    cluster.start_gateway()
    cluster.until(lambda: "no draft token" in cluster.service_line("gateway")["reason"])
    assert "draft: SERVING in stage propose" in cluster.service_line("gateway")["reason"]
    cluster.do(lambda: cluster.draft_status.fail("propose", "injected fault"))
    words = failed_words(cluster)
    assert words.startswith("canary: ")
    assert "draft: FAILED in stage propose: injected fault" in words


def test_a_target_that_fails_during_the_canary_is_named_with_stage_and_reason(cluster):
    cluster.model.step_seconds = 0.2
    cluster.start_gateway()
    cluster.until(lambda: cluster.service_line("gateway")["stage"] == "canary")
    cluster.do(lambda: cluster.target_status.fail("verify", "out of memory"))
    words = failed_words(cluster)
    assert words.startswith("canary: ")
    assert "target: FAILED in stage verify: out of memory" in words


def test_a_target_that_fails_while_serving_ends_streams_with_an_error_event(cluster):
    cluster.start_gateway()
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
    cluster.start_gateway()
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
    cluster.model.script = None
    cluster.wait_ready()
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_killed_target_is_replaced_after_handshake_and_canary(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.model.step_seconds = 0.01
    reader = Reader(cluster)
    cluster.call(cluster.target.stop())
    reader.join(10)
    assert "error" in json.loads(reader.events[-2])
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
    cluster.model.lies_with_drafts = True
    restart(cluster, cluster.draft)
    cluster.link(CLOSED)
    cluster.until(lambda: len(cluster.model.policies) == 2)
    assert not cluster.model.policies[-1].rules
    status, body = cluster.readyz()
    assert status == 200 and body["degraded"]
    assert "token 7" in cluster.service_line("draft")["reason"]
    reasons = cluster.client.get("/status").json()["speculation"]["reasons"]
    assert "drafts change tokens" in reasons[0]
    cluster.model.lies_with_drafts = False
    cluster.until(lambda: not cluster.readyz()[1]["degraded"])
    assert cluster.model.policies[-1].rules


def test_a_target_that_hangs_is_noticed_by_its_silence(cluster):
    cluster.start_gateway(peer_timeout=0.3)
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
