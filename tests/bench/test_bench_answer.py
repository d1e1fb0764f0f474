"""One streamed request: what counts as a token's time, as its number, and as a failure."""

import asyncio
from typing import Any

import httpx
import pytest
from conftest import StreamServer

from outrider.bench.answer import Answer, Question, ask

QUESTION = Question(model="a-model", is_chat=True, max_tokens=7, temperature=0.5, ignores_eos=False)


def chunk(content: str | None, **others: Any) -> dict[str, Any]:
    delta = {"role": "assistant"} if content is None else {"content": content}
    return {"choices": [{"index": 0, "delta": delta}], **others}


def asked(server: StreamServer, question: Question = QUESTION) -> Answer:
    async def run() -> Answer:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            return await ask(client, question, "a prompt", 11)

    return asyncio.run(run())


def test_times_are_those_of_pieces_with_text_and_tokens_those_of_the_usage(
    server: StreamServer,
) -> None:
    server.pause_seconds = 0.05
    usage = {
        "completion_tokens": 9,
        "prompt_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    server.pieces = [
        chunk(None),
        chunk("a"),
        chunk("b"),
        chunk(""),
        {"choices": [], "usage": usage},
    ]
    answer = asked(server)
    assert not answer.error
    assert len(answer.pieces) == 2
    assert (answer.output_tokens, answer.prompt_tokens, answer.cached_tokens) == (9, 30, 16)
    # Behind the role and the first text; two more pauses follow the last text.
    assert 0.09 < answer.first_token_seconds < 0.5
    assert answer.seconds - answer.first_token_seconds > 0.14
    gap = answer.pieces[1] - answer.pieces[0]
    assert answer.inter_token_seconds == pytest.approx(gap / 8)
    (body,) = server.asked
    assert body["path"] == "/v1/chat/completions"
    assert body["messages"] == [{"role": "user", "content": "a prompt"}]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (7, 0.5, 11)
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert "ignore_eos" not in body


def test_without_usage_the_pieces_are_counted_and_one_has_no_time_between(
    server: StreamServer,
) -> None:
    server.pieces = [{"choices": [{"text": "x"}]}]
    answer = asked(
        server,
        Question(model="m", is_chat=False, max_tokens=1, temperature=0, ignores_eos=True),
    )
    assert (answer.output_tokens, answer.inter_token_seconds) == (1, None)
    (body,) = server.asked
    assert body["path"] == "/v1/completions" and body["prompt"] == "a prompt"
    assert body["ignore_eos"] is True


@pytest.mark.parametrize(
    ("pieces", "status", "words"),
    [
        ([], 429, "status 429: "),
        ([chunk("a"), {"error": {"message": "broke"}}], 200, "broke"),
        ([chunk(None)], 200, "an answer without text"),
    ],
)
def test_what_goes_wrong_is_the_answers_error(
    server: StreamServer, pieces: list[dict[str, Any]], status: int, words: str
) -> None:
    server.pieces, server.status = pieces, status
    assert words in asked(server).error


def test_a_server_that_is_gone_is_an_error_and_no_exception(server: StreamServer) -> None:
    url = server.url
    server.stop()

    async def run() -> Answer:
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            return await ask(client, QUESTION, "a", 1)

    assert asyncio.run(run()).error
