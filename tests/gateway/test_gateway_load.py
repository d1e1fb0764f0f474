"""Many clients, slow clients and clients that go away."""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from outrider.v1 import generation_pb2, generation_pb2_grpc

MODEL = "smollm2-135m-instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}


@pytest.fixture(autouse=True)
def plain_model(request):
    """Whatever a test told the fake model is forgotten."""
    yield
    if "ready" in request.fixturenames:
        model = request.getfixturevalue("ready").model
        model.script = None
        model.eos_after = None
        model.step_seconds = 0.0
        model.is_stalled = False


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_client_that_goes_away_is_cancelled_at_the_target(ready, path, is_streamed):
    ready.model.step_seconds = 0.02
    cancelled = len(ready.model.cancelled)
    body = {"model": MODEL, "max_tokens": 400, "stream": is_streamed}
    body["messages" if "chat" in path else "prompt"] = (
        CHAT["messages"] if "chat" in path else "hello"
    )
    payload = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", ready.service.rest_port)) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        connection.sendall(head.encode() + payload)
        if is_streamed:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.1)
    ready.until(lambda: len(ready.model.cancelled) == cancelled + 1)
    ready.until(lambda: running(ready) == 0)


def test_a_reader_that_does_not_read_holds_up_nobody(ready, client):
    body = json.dumps({**CHAT, "max_tokens": 450, "stream": True}).encode()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.connect(("127.0.0.1", ready.service.rest_port))
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
        for _ in range(5):
            assert client.chat.completions.create(**CHAT).usage.completion_tokens == 12
        # The engine's side of the slow one has long ended; only its text waits here.
        ready.until(lambda: running(ready) == 0)


def test_concurrent_requests_all_get_their_own_tokens(ready):
    def answer(seed: int) -> list[int]:
        body = {**CHAT, "seed": seed, "return_token_ids": True, "max_tokens": 40}
        response = ready.client.post("/v1/chat/completions", json=body)
        return response.json()["choices"][0]["token_ids"]

    alone = [answer(seed) for seed in range(12)]
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(answer, range(12)))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 12


def test_over_the_queue_a_request_is_refused_with_429_and_retry_after(cluster):
    cluster.start_gateway(max_waiting_requests=1)
    cluster.wait_ready()
    cluster.model.is_stalled = True
    # 8 run at the target, 4 are queued there, 1 waits here.
    limit = 8 + 4 + 1
    done = []

    def ask() -> None:
        done.append(cluster.client.post("/v1/chat/completions", json=CHAT).status_code)

    threads = [threading.Thread(target=ask) for _ in range(limit)]
    for thread in threads:
        thread.start()
    cluster.until(lambda: waiting(cluster) == 1)
    response = cluster.client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    with grpc.insecure_channel(f"127.0.0.1:{cluster.grpc_port}") as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generation_pb2.GenerateRequest(prompt="Hi"), timeout=10))
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    cluster.model.is_stalled = False
    for thread in threads:
        thread.join()
    assert done == [200] * limit


def test_requests_of_a_window_are_admitted_in_one_batch(cluster):
    cluster.start_gateway(batch_window_ms=200)
    cluster.wait_ready()
    before = len(cluster.model.admitted)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: cluster.client.post("/v1/chat/completions", json=CHAT), range(4)))
    assert [len(batch.sequences) for batch in cluster.model.admitted[before:]] == [4]


def running(cluster) -> int:
    connection = cluster.client.get("/status").json()["connection"]
    return connection["running_requests"] + connection["waiting_requests"]


def waiting(cluster) -> int:
    return cluster.client.get("/status").json()["connection"]["waiting_requests"]


def test_a_body_that_trickles_in_is_given_up_and_keeps_nobody_waiting(cluster):
    cluster.start_gateway(request_body_timeout=0.5)
    cluster.wait_ready()
    with socket.create_connection(("127.0.0.1", cluster.service.rest_port)) as slow:
        slow.settimeout(10)
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\n{")
        started = time.monotonic()
        answer = slow.recv(4096)
        while chunk := slow.recv(4096):
            answer += chunk
        assert 0.4 < time.monotonic() - started < 5
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code": "request_timeout"' in answer and b"after 0.5 s" in answer
    assert cluster.client.post("/v1/chat/completions", json=CHAT).status_code == 200
