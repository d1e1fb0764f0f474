"""Comments in a stream whose answer pauses."""

import json

from readiness_support import CHAT

COMMENT = ": keep-alive"
TOKENS = 60


def lines_with_a_pause(cluster) -> list[str]:
    """The lines of one stream whose target pauses for a second after three events."""
    cluster.model.step_seconds = 0.02
    body = {
        **CHAT,
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
        "speculation": {"draft_length": 0},
        "stream": True,
    }
    lines: list[str] = []
    with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line:
                continue
            lines.append(line)
            if len(lines) == 3:
                cluster.model.is_stalled = True
                cluster.loop.call_soon_threadsafe(
                    cluster.loop.call_later, 1.0, setattr, cluster.model, "is_stalled", False
                )
    return lines


def token_count(lines: list[str]) -> int:
    events = [
        json.loads(line.removeprefix("data: "))
        for line in lines
        if line not in (COMMENT, "data: [DONE]")
    ]
    return sum(
        len(choice["delta"].get("token_ids") or ())
        for event in events
        for choice in event["choices"]
    )


def test_a_pause_is_filled_with_comments_and_the_answer_is_whole(cluster):
    cluster.start_gateway(stream_keep_alive=0.2)
    cluster.wait_ready()
    lines = lines_with_a_pause(cluster)
    assert 2 <= lines.count(COMMENT) <= 5
    assert lines[0] != COMMENT and lines[-1] == "data: [DONE]"
    assert token_count(lines) == TOKENS


def test_zero_sends_no_comments(cluster):
    cluster.start_gateway(stream_keep_alive=0)
    cluster.wait_ready()
    lines = lines_with_a_pause(cluster)
    assert COMMENT not in lines
    assert token_count(lines) == TOKENS
