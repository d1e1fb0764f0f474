"""Statuses and exits in words, the same in every command."""

import signal

from outrider.v1 import status_pb2


def exit_words(return_code: int) -> str:
    """`exit code 1` or `signal 9 (SIGKILL)`, from a process's return code as Python tells it."""
    if return_code >= 0:
        return f"exit code {return_code}"
    number = -return_code
    names = {member.value: member.name for member in signal.Signals}
    return f"signal {number} ({names[number]})" if number in names else f"signal {number}"


def failure_words(failure: status_pb2.Failure) -> str:
    """`stage weights: out of memory`."""
    return f"stage {failure.stage}: {one_line(failure.reason)}"


def stage_words(status: status_pb2.ServiceStatus) -> str:
    """The stage or activity that a service is in, or its last one, with its detail."""
    entered = [stage for stage in status.stages if stage.state != status_pb2.STAGE_STATE_PENDING]
    running = [stage for stage in entered if stage.state == status_pb2.STAGE_STATE_RUNNING]
    if not entered:
        return "launch"
    stage = (running or entered)[-1]
    return f"{stage.name} ({one_line(stage.detail)})" if stage.detail else stage.name


def stage_state_name(state: int) -> str:
    """`running` for STAGE_STATE_RUNNING, and so on."""
    return status_pb2.StageState.Name(state).removeprefix("STAGE_STATE_").lower()


def one_line(text: str) -> str:
    """The text with its line breaks and runs of blanks made single blanks."""
    return " ".join(text.split())
