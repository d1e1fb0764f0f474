"""Clients that send a request's head a byte at a time, or half of it."""

import socket
import time

import pytest
from readiness_support import CHAT

from gateway import head_timeout

BOUND = 0.5


@pytest.fixture(autouse=True)
def short_bound(monkeypatch):
    monkeypatch.setattr(head_timeout, "HEAD_TIMEOUT_SECONDS", BOUND)


def seconds_until_closed(connection: socket.socket, trickle: bytes) -> float:
    """Sends `trickle`, over and over, until the gateway closes."""
    started = time.monotonic()
    connection.settimeout(0.05)
    while time.monotonic() - started < 10:
        try:
            if trickle:
                connection.sendall(trickle)
            if connection.recv(4096) == b"":
                break
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            break
    return time.monotonic() - started


@pytest.mark.parametrize("trickle", [b"a", b""])
def test_a_head_that_does_not_end_is_given_up_and_keeps_nobody_waiting(ready, trickle):
    with socket.create_connection(("127.0.0.1", ready.service.rest_port)) as slow:
        slow.sendall(b"GET /livez HTTP/1.1\r\nhost: ")
        assert ready.client.post("/v1/chat/completions", json=CHAT).status_code == 200
        assert seconds_until_closed(slow, trickle) < 5


def test_the_same_bound_holds_for_the_next_head_on_a_connection(ready):
    with socket.create_connection(("127.0.0.1", ready.service.rest_port)) as slow:
        for _ in range(2):
            slow.settimeout(10)
            slow.sendall(b"GET /livez HTTP/1.1\r\nhost: a\r\n\r\n")
            assert slow.recv(4096).startswith(b"HTTP/1.1 200")
            # Longer than the bound: it is not about connections between two requests.
            time.sleep(2 * BOUND)
        slow.sendall(b"GET /livez HTTP/1.1\r\nhost: ")
        assert seconds_until_closed(slow, b"a") < 5


def test_an_answer_may_take_longer_than_the_head(ready):
    ready.model.step_seconds = 0.1
    try:
        answer = ready.client.post(
            "/v1/chat/completions",
            json={**CHAT, "max_tokens": 12, "ignore_eos": True, "speculation": {"draft_length": 0}},
        )
    finally:
        ready.model.step_seconds = 0.0
    assert answer.status_code == 200
    assert answer.elapsed.total_seconds() > 2 * BOUND
