"""A child process by itself: what is told of it and in which words."""

import asyncio
import os
import sys

import pytest

from outrider.cli.child import Child, ChildEvent, ChildPlan, Exited, Silent
from outrider.cli.ports import free_port
from outrider.cli.words import exit_words


def plan(program: str, *, launch_timeout: float = 30.0) -> ChildPlan:
    return ChildPlan(
        service="draft",
        arguments=("-c", program),
        environment=dict(os.environ),
        address=f"127.0.0.1:{free_port('127.0.0.1', set())}",
        launch_timeout_seconds=launch_timeout,
        drain_timeout_seconds=0.1,
    )


async def first_event(child_plan: ChildPlan) -> tuple[ChildEvent, str, list[str]]:
    """What is told first, the failure's words at that time, and the log."""
    events: asyncio.Queue[ChildEvent] = asyncio.Queue()
    log: list[str] = []
    child = Child(child_plan, on_event=events.put_nowait, on_log=lambda _, line: log.append(line))
    await child.start()
    event = await asyncio.wait_for(events.get(), 20)
    words = child.failure()
    await child.stop()
    return event, words, log


def test_a_process_that_ends_before_its_port_is_open_is_told_by_its_last_line() -> None:
    program = "import sys; print('first'); sys.exit('draft: no such model')"
    event, words, log = asyncio.run(first_event(plan(program)))
    assert isinstance(event, Exited)
    assert words == "stage launch: exit code 1 before its port was open: draft: no such model"
    assert sorted(log) == ["draft: no such model", "first"]


def test_a_process_that_never_opens_its_port_is_told_as_silent() -> None:
    child_plan = plan("import time; time.sleep(60)", launch_timeout=0.3)
    event, words, _ = asyncio.run(first_event(child_plan))
    assert isinstance(event, Silent)
    assert words == f"stage launch: its port {child_plan.address} did not open within 0.3 s"


def test_a_line_of_any_length_and_of_any_bytes_is_logged() -> None:
    program = "import os; os.write(1, b'x' * 300_000 + b'\\n\\xff\\nno end')"
    _, _, log = asyncio.run(first_event(plan(program)))
    assert [len(log[0]), *log[1:]] == [300_000, "\ufffd", "no end"]


def test_the_process_becomes_the_program_and_keeps_no_other_in_between() -> None:
    program = "import os; print(os.getpgid(0) == os.getpid(), os.getppid())"
    _, _, log = asyncio.run(first_event(plan(program)))
    assert log == [f"True {os.getpid()}"]


@pytest.mark.parametrize(
    ("return_code", "words"),
    [(0, "exit code 0"), (70, "exit code 70"), (-9, "signal 9 (SIGKILL)"), (-99, "signal 99")],
)
def test_an_exit_is_told_by_code_or_by_signal(return_code: int, words: str) -> None:
    assert exit_words(return_code) == words


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal")
def test_a_program_whose_parent_is_gone_already_is_not_started() -> None:
    async def run() -> tuple[int | None, bytes]:
        from outrider.cli.child import TETHER

        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(TETHER),
            "1",
            sys.executable,
            "-c",
            "print('started')",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        return process.returncode, output

    code, output = asyncio.run(run())
    assert code == 1
    assert output == b"the parent process 1 is gone\n"
