"""`outrider bench` against a server that is laid down, and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import StreamServer
from typer.testing import CliRunner, Result

from outrider.bench.load import Load
from outrider.bench.plot import PlotError, require_plots
from outrider.cli.bench import flags_of, parse_flags, parse_loads, parse_modes
from outrider.cli.main import app

METRICS = """\
# TYPE outrider_drafts_total counter
outrider_drafts_total {drafts}
# TYPE outrider_accepted_tokens_total counter
outrider_accepted_tokens_total {accepted}
# TYPE outrider_steps_total counter
outrider_steps_total{{mode="speculative"}} {speculative}
outrider_steps_total{{mode="plain"}} {plain}
"""


@pytest.fixture
def answering(server: StreamServer) -> StreamServer:
    server.pieces = [
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [], "usage": {"completion_tokens": 5, "prompt_tokens": 3}},
    ]
    return server


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "200"})


def test_every_load_is_measured_as_often_as_asked_and_written_down(
    answering: StreamServer, tmp_path: Path
) -> None:
    answering.metrics = [
        METRICS.format(drafts=0, accepted=0, speculative=0, plain=0),
        METRICS.format(drafts=4, accepted=6, speculative=3, plain=1),
        METRICS.format(drafts=4, accepted=6, speculative=3, plain=1),
    ]
    answers, picture = tmp_path / "figures.json", tmp_path / "curves.png"
    result = bench(
        "--url", answering.url + "/v1", "--concurrency", "1,3", "--rate", "100", "--requests", "6",
        "--warm-up", "1", "--repeat", "2", "--max-tokens", "5", "--api-key", "secret",
        "--json", str(answers), "--plot", str(picture),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    document: dict[str, Any] = json.loads(answers.read_text())
    loads = [(run["concurrency"], run["rate"], run["repetition"]) for run in document["runs"]]
    assert loads == [(1, None, 0), (3, None, 0), (None, 100, 0),
                     (1, None, 1), (3, None, 1), (None, 100, 1)]  # fmt: skip
    first = document["runs"][0]
    assert (first["requests"], first["errors"], first["output_tokens"]) == (6, 0, 30)
    assert first["acceptance_length"] == 2.5 and first["bypass_share"] == 0.25
    assert document["runs"][1]["acceptance_length"] is None
    assert document["settings"]["max_tokens"] == 5
    assert "secret" not in answers.read_text()
    assert set(answering.headers) == {"Bearer secret"}
    # A warm-up before each of the six runs.
    assert len(answering.asked) == 6 * (6 + 1)
    assert answering.asked[0]["model"] == "a-model"
    rows = [
        line.split() for line in result.output.splitlines() if line.startswith(f"{answering.url} ")
    ]
    assert [row[1 : 3 if "/s" in row[1] else 5] for row in rows] == [
        ["1", "at", "once", "12"],
        ["3", "at", "once", "12"],
        ["100/s", "12"],
    ]


def test_every_run_is_asked_the_same_but_for_its_repetition(answering: StreamServer) -> None:
    arguments = ("--url", answering.url, "--concurrency", "1", "--requests", "5", "--repeat", "2")
    assert bench(*arguments).exit_code == 0
    asked = [body["messages"][0]["content"] for body in answering.asked]
    answering.asked.clear()
    assert bench(*arguments).exit_code == 0
    assert [body["messages"][0]["content"] for body in answering.asked] == asked
    assert asked[:6] != asked[6:]


def test_requests_that_fail_are_told_and_a_server_where_all_do_is_an_error(
    answering: StreamServer,
) -> None:
    answering.status = 429
    result = bench("--url", answering.url, "--concurrency", "2", "--requests", "3")
    assert result.exit_code == 1
    assert "every request failed, the first: status 429" in result.output


def test_without_a_server_that_is_said(answering: StreamServer) -> None:
    url = answering.url
    answering.stop()
    result = bench("--url", url)
    assert result.exit_code == 1
    assert f"no server at {url}" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--modes", "off,three"), "--modes: 'three' must be off, auto or a draft length"),
        (("--modes", "3,3"), "names a mode twice"),
        (("--modes", "off", "--up", "device"), "--up: 'device' must be FLAG=VALUE"),
        (("--modes", "off", "--up", "colour=red"), "--colour: none of the services"),
        (("--concurrency", "0"), "--concurrency: '0' must be"),
        (("--rate", "fast"), "--rate: 'fast' must be a number above 0"),
        (("--prompts", "/nowhere.jsonl"), "/nowhere.jsonl: "),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(
    arguments: tuple[str, ...], words: str
) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert words in result.output


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises((PlotError, ValueError)):
        require_plots()


def test_modes_are_flags_of_own_servers() -> None:
    assert parse_modes("off, 3,auto") == ["off", "3", "auto"]
    assert flags_of("off") == {"speculation": "off"}
    assert flags_of("5") == {"speculation": "fixed", "max_draft_length": "5"}
    assert parse_flags(["--device=cuda", "draft-model=a=b"]) == {
        "device": "cuda",
        "draft_model": "a=b",
    }
    assert parse_loads("1,16", "0.5") == [
        Load(concurrency=1),
        Load(concurrency=16),
        Load(rate=0.5),
    ]
