"""A target that is lost and comes back, as clients of REST and gRPC see it: a pause."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
from readiness_support import CHAT, restart

from outrider.v1 import generation_pb2, generation_pb2_grpc

# Long enough to lose the target in the middle.
STEP_SECONDS = 0.02
TOKENS = 120
BODY = {
    **CHAT,
    "max_tokens": TOKENS,
    "temperature": 0.8,
    "ignore_eos": True,
    "return_token_ids": True,
    "speculation": {"draft_length": 0},
}


def whole(cluster, seed: int) -> tuple[str, list[int], dict]:
    response = cluster.client.post("/v1/chat/completions", json={**BODY, "seed": seed})
    assert response.status_code == 200, response.text
    body = response.json()
    choice = body["choices"][0]
    return choice["message"]["content"], choice["token_ids"], body["usage"]


def streamed(cluster, seed: int) -> tuple[str, list[int], dict]:
    text, token_ids, usage = "", [], {}
    body = {**BODY, "seed": seed, "stream": True, "stream_options": {"include_usage": True}}
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if not line or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                token_ids += choice["delta"].get("token_ids") or []
    return text, token_ids, usage


def over_grpc(cluster, seed: int) -> tuple[str, list[int], dict]:
    request = generation_pb2.GenerateRequest(
        chat=generation_pb2.ChatMessages(
            messages=[generation_pb2.ChatMessage(role="user", content="Hello")]
        ),
        max_tokens=TOKENS,
        ignore_eos=True,
    )
    request.sampling.temperature = 0.8
    request.sampling.seed = seed
    request.speculation.draft_length = 0
    with grpc.insecure_channel(
        f"127.0.0.1:{cluster.grpc_port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        text, token_ids = "", []
        for response in generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            request, timeout=60
        ):
            text += response.text
            token_ids += response.token_ids
            finished = response.finished
    return text, token_ids, {
        "prompt_tokens": finished.usage.prompt_tokens,
        "completion_tokens": finished.usage.completion_tokens,
    }  # fmt: skip


def test_every_kind_of_client_sees_a_pause_and_the_same_answer(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    ways = (whole, streamed, over_grpc)
    undisturbed = [way(cluster, seed) for seed, way in enumerate(ways)]
    cluster.model.step_seconds = STEP_SECONDS
    with ThreadPoolExecutor(len(ways)) as pool:
        running = [pool.submit(way, cluster, seed) for seed, way in enumerate(ways)]
        admitted = len(cluster.model.admitted)
        for _ in range(2):
            time.sleep(30 * STEP_SECONDS)
            restart(cluster, cluster.target)
            cluster.wait_ready()
        disturbed = [future.result(60) for future in running]
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after[:2] == before[:2]
        assert len(after[1]) == TOKENS
        for count in ("prompt_tokens", "completion_tokens"):
            assert after[2][count] == before[2][count]
    resumed = [
        len(admit.resumed_output_token_ids) // 4
        for batch in cluster.model.admitted[admitted:]
        for admit in batch.sequences
        if admit.resumed_output_token_ids
    ]
    assert len(resumed) == 6 and 0 < min(resumed) < max(resumed) < TOKENS
    page = cluster.client.get("/status").json()["replay"]
    assert (page["replayed"], page["waiting_requests"]) == (6, 0)
    assert set(page["given_up"].values()) == {0}
    metrics = cluster.client.get("/metrics").text.splitlines()
    assert "outrider_replayed_sequences_total 6.0" in metrics
    assert "outrider_sequences_awaiting_replay 0.0" in metrics
    assert 'outrider_replays_given_up_total{reason="attempts"} 0.0' in metrics


def test_a_poisonous_request_ends_with_an_error_event_and_the_target_is_served_again(cluster):
    cluster.start_gateway(max_replays=2)
    cluster.wait_ready()
    cluster.model.poison_seed = 666
    body = {**BODY, "seed": 666, "stream": True}
    response = cluster.client.post("/v1/chat/completions", json=body)
    # Nothing was sent before: the error can still be a status.
    assert response.status_code == 503 and response.headers["retry-after"]
    assert "killed by the poison; given up after 2 replays" in response.json()["error"]["message"]
    sent = sum(
        admit.sampling.seed == 666 for batch in cluster.model.admitted for admit in batch.sequences
    )
    assert sent == 3
    cluster.wait_ready()
    assert len(whole(cluster, 1)[1]) == TOKENS
    page = cluster.client.get("/status").json()["replay"]
    assert page["given_up"]["attempts"] == 1


def test_a_target_that_does_not_come_back_ends_a_stream_with_an_error_event(cluster):
    cluster.start_gateway(replay_timeout=0.3)
    cluster.wait_ready()
    cluster.model.step_seconds = STEP_SECONDS
    events: list[str] = []
    body = {**BODY, "seed": 1, "stream": True}
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        for line in response.iter_lines():
            if line:
                events.append(line.removeprefix("data: "))
            if len(events) == 8:
                cluster.call(cluster.target.stop())
    assert events[-1] == "[DONE]"
    error = json.loads(events[-2])["error"]
    assert error["type"] == "service_unavailable_error"
    assert "none came back within 0.3 s" in error["message"]


def test_a_target_of_another_model_does_not_go_on_with_an_answer(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    cluster.model.step_seconds = STEP_SECONDS
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(over_grpc, cluster, 1)
        time.sleep(30 * STEP_SECONDS)
        cluster.call(cluster.target.stop())
        cluster.model.info.identity.fingerprint = "another"
        cluster.do(cluster.target.new_process)
        cluster.call(cluster.target.start())
        error = call.exception(30)
    assert isinstance(error, grpc.RpcError)
    assert error.code() == grpc.StatusCode.UNAVAILABLE
    assert "fingerprint='another'" in error.details()
    cluster.wait_ready()
    cluster.model.step_seconds = 0.0
    assert len(whole(cluster, 1)[1]) == TOKENS


def test_a_draining_gateway_finishes_answers_that_lost_their_target(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    undisturbed = whole(cluster, 3)
    cluster.model.step_seconds = STEP_SECONDS
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streamed, cluster, 3)
        time.sleep(30 * STEP_SECONDS)
        cluster.call(cluster.target.stop())
        cluster.lifecycle.drain()
        cluster.do(cluster.target.new_process)
        cluster.call(cluster.target.start())
        cluster.call(cluster.service.drain(20))
        assert running.result(5)[:2] == undisturbed[:2]


def test_a_step_that_fails_is_a_pause_too(cluster):
    cluster.start_gateway()
    cluster.wait_ready()
    undisturbed = streamed(cluster, 4)
    cluster.model.step_seconds = STEP_SECONDS
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(streamed, cluster, 4)
        time.sleep(30 * STEP_SECONDS)
        cluster.do(lambda: cluster.target_status.fail("step", "index out of range"))
        cluster.until(lambda: cluster.readyz()[0] == 503)
        # Whoever is new is told at once.
        assert cluster.client.post("/v1/chat/completions", json=BODY).status_code == 503
        assert cluster.client.get("/status").json()["replay"]["waiting_requests"] == 1
        restart(cluster, cluster.target)
        assert running.result(30)[:2] == undisturbed[:2]
