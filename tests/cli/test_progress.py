"""What a person sees of a start-up, with and without a terminal."""

import io
import time

import pytest
from rich.console import Console

from outrider.cli.logs import ConsoleLogs
from outrider.cli.progress import LiveDisplay, PlainDisplay
from outrider.v1 import status_pb2

DONE = status_pb2.STAGE_STATE_DONE
RUNNING = status_pb2.STAGE_STATE_RUNNING
PENDING = status_pb2.STAGE_STATE_PENDING
FAILED = status_pb2.STAGE_STATE_FAILED


def status(
    *stages: tuple[str, status_pb2.StageState, str],
    state: status_pb2.ServiceState = status_pb2.SERVICE_STATE_LOADING,
    boot_id: int = 1,
    failure: status_pb2.Failure | None = None,
) -> status_pb2.ServiceStatus:
    return status_pb2.ServiceStatus(
        service="target",
        state=state,
        boot_id=boot_id,
        failure=failure,
        stages=[
            status_pb2.Stage(name=name, state=stage_state, seconds=1.5, detail=detail)
            for name, stage_state, detail in stages
        ],
    )


def plain_lines(*statuses: status_pb2.ServiceStatus) -> list[str]:
    output = io.StringIO()
    console = Console(file=output, width=40)
    display = PlainDisplay(console, ConsoleLogs(console))
    for one in statuses:
        display.status("target", one)
    return output.getvalue().splitlines()


def test_only_changes_are_told_each_once_and_unwrapped() -> None:
    detail = "a detail that is longer than the terminal is wide"
    first = status(("config", RUNNING, ""), ("weights", PENDING, ""))
    second = status(("config", DONE, detail), ("weights", RUNNING, ""))
    assert plain_lines(first, first, second, second) == [
        "target: config running",
        "target: LOADING",
        f"target: config done in 1.50 s: {detail}",
        "target: weights running",
    ]


def test_a_stage_that_was_missed_is_told_by_its_end() -> None:
    assert "target: config done in 1.50 s" in plain_lines(status(("config", DONE, "")))


def test_what_a_service_does_again_and_again_is_told_only_when_it_fails() -> None:
    lines = plain_lines(status(("step", RUNNING, "")), status(("step", DONE, "")))
    assert lines == ["target: LOADING"]
    assert "target: step failed in 1.50 s" in plain_lines(status(("step", FAILED, "")))


def test_another_process_is_told_from_its_beginning() -> None:
    lines = plain_lines(status(("config", DONE, "")), status(("config", DONE, ""), boot_id=2))
    assert lines.count("target: config done in 1.50 s") == 2


def test_markup_in_a_log_line_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    console = Console(file=output, width=80)
    ConsoleLogs(console).write("draft", "[red] is [not] a colour :smile:")
    assert output.getvalue() == "  draft | [red] is [not] a colour :smile:\n"


def test_a_terminal_shows_every_service_with_its_stages_and_reason() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    display = LiveDisplay(console, ConsoleLogs(console), ["target", "draft"])
    failed = status(
        ("config", DONE, ""),
        ("weights", FAILED, ""),
        ("kv_cache", PENDING, ""),
        ("step", DONE, ""),
        state=status_pb2.SERVICE_STATE_FAILED,
        failure=status_pb2.Failure(stage="weights", reason="tensor [x]\nis missing"),
    )
    display.status("target", failed)
    time.sleep(0.05)
    display.event("an event [as text]")
    display.close()
    shown = output.getvalue()
    assert "an event [as text]" in shown
    last = " ".join(shown[shown.rindex("service ") :].split())
    assert "target FAILED config 1.5s weights 1.5s kv_cache weights: tensor [x] is missing" in last
    assert "draft starting" in last
    assert "step" not in last
