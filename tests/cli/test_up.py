"""`outrider up` as a process, over small services with the real life cycle."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from up_process import UpProcess

from outrider.serving.stages import ENGINE_STAGES, GATEWAY_STAGES, NGRAM_STAGES

StartUp = Callable[..., UpProcess]

SERVICES = ("target", "draft", "gateway")


def readiness(url: str) -> int:
    return httpx.get(f"{url}/readyz", trust_env=False).status_code


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pid: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun:
    """Start, ready, Ctrl-C."""

    up: UpProcess
    url: str
    readiness: int
    pids: tuple[int, ...]
    exit_code: int


@pytest.fixture(scope="module")
def whole_run() -> Iterator[WholeRun]:
    up = UpProcess()
    url = up.wait_for("^ready ").removeprefix("ready ")
    answered = readiness(url)
    pids = tuple(up.child_pid(service) for service in SERVICES)
    up.process.send_signal(signal.SIGINT)
    yield WholeRun(up=up, url=url, readiness=answered, pids=pids, exit_code=up.exit_code())
    up.close()


def test_one_ready_line_comes_on_standard_output_when_readyz_answers_200(
    whole_run: WholeRun,
) -> None:
    assert whole_run.readiness == 200
    assert whole_run.up.output == [f"ready {whole_run.url}"]


def test_every_stage_of_every_service_is_told_in_lines(whole_run: WholeRun) -> None:
    stages = {"target": ENGINE_STAGES, "draft": NGRAM_STAGES, "gateway": GATEWAY_STAGES}
    for service, names in stages.items():
        for name in names:
            start = f"{service}: {name} "
            lines = [line for line in whole_run.up.errors if line.startswith(start)]
            assert lines, (service, name)
            assert lines[-1].removeprefix(start).startswith(("done in ", "skipped: fake"))


def test_a_stop_drains_the_gateway_then_the_target_then_the_draft(whole_run: WholeRun) -> None:
    assert whole_run.exit_code == 0
    drained = [line.split()[-2] for line in whole_run.up.errors if line.endswith("drains")]
    assert drained == ["gateway", "target", "draft"]
    assert not any(is_alive(pid) for pid in whole_run.pids)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("target:weights:raise", "target failed in stage weights: InjectedFault"),
        pytest.param(
            "draft:first_decode:raise",
            "draft failed in stage first_decode: InjectedFault",
            marks=pytest.mark.full,
        ),
        ("gateway:canary:raise", "gateway failed in stage canary: InjectedFault"),
        ("target:kv_cache:exit", "target failed in stage kv_cache: exit code 70"),
        pytest.param(
            "gateway:handshake:exit",
            "gateway failed in stage handshake: exit code 70",
            marks=pytest.mark.full,
        ),
        ("draft:config:hang", "draft failed in stage config: not finished after"),
    ],
)
def test_a_failed_start_up_ends_with_service_stage_and_reason(
    start_up: StartUp, fault: str, words: str
) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT=fault, OUTRIDER_STARTUP_TIMEOUT="2")
    assert up.exit_code() == 1
    assert up.output == []
    assert words in up.errors[-1]
    assert sum(words in line for line in up.errors) == 1


def test_a_service_that_is_killed_during_start_up_is_told_by_its_signal(
    start_up: StartUp,
) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="draft:first_decode:hang")
    up.wait_for("^draft: first_decode running")
    os.kill(up.child_pid("draft"), signal.SIGKILL)
    assert up.exit_code() == 1
    assert up.errors[-1] == "draft failed in stage first_decode: signal 9 (SIGKILL)"


def test_a_held_failure_stays_up_at_503_and_ends_with_a_non_zero_exit(start_up: StartUp) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="target:attention:raise", FAKE_HOLD="1")
    line = up.wait_for("^target failed in stage attention: InjectedFault.*held")
    url = line.partition("look at ")[2].partition("/readyz")[0]
    time.sleep(0.5)
    assert readiness(url) == 503
    assert up.process.poll() is None
    pid = up.child_pid("target")
    up.process.send_signal(signal.SIGTERM)
    assert up.exit_code() == 1
    assert wait_until_dead(pid)


def test_a_service_that_exits_while_failures_are_held_is_not_started_again(
    start_up: StartUp,
) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="draft:config:exit", FAKE_HOLD="1")
    up.wait_for("^draft failed in stage config: exit code 70")
    time.sleep(1.5)
    assert not any("restarting" in line for line in up.errors)
    with pytest.raises(AssertionError, match="no draft runs"):
        up.child_pid("draft")


def test_a_service_that_dies_later_is_restarted_on_its_port_with_growing_delays(
    start_up: StartUp,
) -> None:
    up = start_up()
    url = up.wait_for("^ready ").removeprefix("ready ")
    for delay in ("0.5", "1"):
        os.kill(up.child_pid("target"), signal.SIGKILL)
        line = up.wait_for("^target died")
        assert line == f"target died (signal 9 (SIGKILL)), restarting in {delay} s"
        assert readiness(url) == 503
        up.wait_for("^target is SERVING again")
        assert readiness(url) == 200
    up.process.send_signal(signal.SIGTERM)
    assert up.exit_code() == 0


def test_a_service_that_fails_later_is_restarted_and_its_reason_told(start_up: StartUp) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="target:step:raise@20")
    up.wait_for("^ready ")
    line = up.wait_for("^target died")
    assert line.startswith("target died (exit code 1; stage step: InjectedFault")
    up.wait_for("^target is SERVING again")


@pytest.mark.full
def test_a_held_failure_after_readiness_is_told_and_not_restarted(start_up: StartUp) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="target:step:raise@20", FAKE_HOLD="1")
    url = up.wait_for("^ready ").removeprefix("ready ")
    up.wait_for(r"^target failed in stage step: InjectedFault.*\(held")
    assert readiness(url) == 503
    assert not any("restarting" in line for line in up.errors)


def test_the_services_die_with_up_even_if_it_is_killed(start_up: StartUp) -> None:
    up = start_up()
    up.wait_for("^ready ")
    pids = [up.child_pid(service) for service in SERVICES]
    os.kill(pids[0], signal.SIGSTOP)
    up.process.kill()
    assert all(wait_until_dead(pid) for pid in pids)


def test_a_second_signal_kills_what_does_not_drain(start_up: StartUp) -> None:
    up = start_up(OUTRIDER_IGNORE_STOP="true")
    up.wait_for("^ready ")
    pid = up.child_pid("target")
    up.process.send_signal(signal.SIGINT)
    up.wait_for("target drains")
    up.process.send_signal(signal.SIGINT)
    assert up.exit_code() == 130
    assert not is_alive(pid)


@pytest.mark.full
def test_a_service_that_does_not_drain_in_time_is_killed_and_that_is_said(
    start_up: StartUp,
) -> None:
    up = start_up(OUTRIDER_IGNORE_STOP="true", OUTRIDER_DRAIN_TIMEOUT="0.1")
    up.wait_for("^ready ")
    up.process.send_signal(signal.SIGINT)
    up.wait_for(r"^target did not stop within its drain timeout of 0.1 s and was killed")
    assert up.exit_code() == 0


def test_a_stop_during_start_up_is_honoured_at_once(start_up: StartUp) -> None:
    up = start_up(OUTRIDER_INJECT_FAULT="target:weights:hang")
    up.wait_for("^target: weights running")
    started = time.monotonic()
    up.process.send_signal(signal.SIGTERM)
    assert up.exit_code() == 0
    assert time.monotonic() - started < 5
    assert up.output == []


def test_logs_go_to_one_file_per_service_where_a_directory_is_given(
    start_up: StartUp, tmp_path: Path
) -> None:
    up = start_up(str(tmp_path / "logs"))
    up.wait_for("^ready ")
    up.process.send_signal(signal.SIGTERM)
    up.exit_code()
    for service in SERVICES:
        assert f"{service}: SERVING" in (tmp_path / "logs" / f"{service}.log").read_text()
    assert not any(" | " in line for line in up.errors)
