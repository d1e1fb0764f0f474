"""`outrider chat` and the demo against a server whose answers are laid down."""

import asyncio
import io
import json
from dataclasses import replace
from typing import Any

import pytest
from rest_server import RestServer, server_sent_events

from outrider.cli.chat import ChatOptions, converse
from outrider.cli.completion import Figures, ServerError
from outrider.cli.demo import show

OPTIONS = ChatOptions(temperature=None, seed=None, max_tokens=None, speculates=True)
MODELS = json.dumps({"data": [{"id": "some-model"}]})
METRICS = "# TYPE outrider_drafts_total counter\noutrider_drafts_total 7.0\n"


def piece(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def usage(accepted: int = 6, rejected: int = 2, **details: int) -> dict[str, Any]:
    return {
        "choices": [],
        "usage": {
            "completion_tokens": 10,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": rejected,
                **details,
            },
        },
    }


def server(*events: dict[str, Any], chat: tuple[int, str] | None = None) -> RestServer:
    return RestServer(
        {
            "/v1/models": (200, MODELS),
            "/v1/chat/completions": chat or (200, server_sent_events(*events)),
            "/metrics": (200, METRICS),
        }
    )


def test_the_answer_goes_to_standard_output_and_the_figures_to_standard_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(piece("Because "), piece("of é."), usage()) as rest:
        assert asyncio.run(converse(rest.url, "Why?", OPTIONS)) == 0
    output = capsys.readouterr()
    assert output.out == "Because of é.\n"
    assert "6 of 8 draft tokens accepted (75%)" in output.err
    assert "tokens/s" in output.err


def test_options_become_fields_of_the_request_and_what_is_not_given_does_not() -> None:
    with server(piece("a"), usage()) as rest:
        asyncio.run(converse(rest.url, "Why?", OPTIONS))
        given = ChatOptions(temperature=0.0, seed=7, max_tokens=5, speculates=False)
        asyncio.run(converse(rest.url, "Why?", given))
        plain, full = rest.requests
    assert plain["messages"] == [{"role": "user", "content": "Why?"}]
    assert plain["model"] == "some-model"
    assert not {"temperature", "seed", "max_tokens", "speculation"} & plain.keys()
    assert (full["temperature"], full["seed"], full["max_tokens"]) == (0.0, 7, 5)
    assert full["speculation"] == {"draft_length": 0}


def test_a_conversation_sends_all_that_was_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("first\n\nsecond\n"))
    with server(piece("answer"), usage()) as rest:
        assert asyncio.run(converse(rest.url, None, OPTIONS)) == 0
        messages = rest.requests[1]["messages"]
    assert [message["content"] for message in messages] == ["first", "answer", "second"]
    assert len(rest.requests) == 2


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (
            (400, json.dumps({"error": {"message": "temperature is -1, must be >= 0"}})),
            "the server answered 400: temperature is -1, must be >= 0",
        ),
        ((503, "not JSON"), "the server answered 503: not JSON"),
        ((200, server_sent_events(piece("half"))), "broke off"),
        (
            (200, server_sent_events({"error": {"message": "target: GONE"}})),
            "target: GONE",
        ),
    ],
)
def test_a_refused_or_broken_answer_is_an_error_with_the_servers_words(
    capsys: pytest.CaptureFixture[str], chat: tuple[int, str], words: str
) -> None:
    with server(chat=chat) as rest:
        assert asyncio.run(converse(rest.url, "Why?", OPTIONS)) == 1
    assert words in capsys.readouterr().err


def test_no_server_is_an_error_that_names_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as rest:
        url = rest.url
    assert asyncio.run(converse(url, "Why?", OPTIONS)) == 1
    assert f"no server at {url}" in capsys.readouterr().err


def test_acceptance_length_counts_the_targets_own_token() -> None:
    figures = Figures(
        completion_tokens=10,
        accepted_tokens=6,
        rejected_tokens=2,
        drafts=4,
        first_piece_seconds=0.5,
        seconds=2.0,
    )
    assert figures.words() == (
        "10 tokens in 2.00 s, 5.0 tokens/s, first after 0.50 s, 4 drafts, "
        "6 of 8 draft tokens accepted (75%), acceptance length 2.50"
    )
    without = replace(figures, accepted_tokens=0, rejected_tokens=0, drafts=0)
    assert without.words().endswith("no drafts")


def test_the_demo_asks_with_and_without_speculation_and_compares(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with server(piece("Light."), usage()) as rest:
        assert asyncio.run(show(rest.url)) == 0
        assert ["speculation" in request for request in rest.requests] == [False, True]
    assert "The text is the same" in capsys.readouterr().out


def test_the_demo_fails_with_the_servers_words() -> None:
    with server(chat=(503, "{}")) as rest, pytest.raises(ServerError, match="503"):
        asyncio.run(show(rest.url))
