"""Start-up progress on standard error: one line a change, or a live table in a terminal.

Both also take everything else that has to be said meanwhile, so that nothing tears the table.
"""

from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.cli.logs import LogSink
from outrider.cli.words import one_line, stage_state_name
from outrider.serving.stages import ENGINE_STAGES, GATEWAY_STAGES, NGRAM_STAGES, state_name
from outrider.v1 import status_pb2

# The rest of what a status lists is done again and again; nothing to follow.
STARTUP_STAGES = {*ENGINE_STAGES, *NGRAM_STAGES, *GATEWAY_STAGES}
REFRESHES_PER_SECOND = 8
STATE_STYLES = {
    "SERVING": "bold green",
    "FAILED": "bold red",
    "DRAINING": "yellow",
}
STAGE_STYLES = {
    "pending": "dim",
    "running": "bold yellow",
    "done": "green",
    "skipped": "dim green",
    "failed": "bold red",
}


class Display(Protocol):
    """Where a supervisor says what happens."""

    def status(self, service: str, status: status_pb2.ServiceStatus) -> None:
        """A service's latest status."""

    def log(self, service: str, line: str) -> None:
        """A line of a service's log."""

    def event(self, line: str) -> None:
        """Something that an operator should know."""

    def failure(self, line: str) -> None:
        """Why the start-up failed, in one line."""

    def ready(self) -> None:
        """Everything serves."""

    def close(self) -> None:
        """Nothing more will be said."""


class PlainDisplay:
    """One line for every change of a stage or a state."""

    def __init__(self, console: Console, logs: LogSink) -> None:
        self._console = console
        self._logs = logs
        self._states: dict[str, tuple[int, int]] = {}
        self._stages: dict[tuple[str, int, str], int] = {}

    def status(self, service: str, status: status_pb2.ServiceStatus) -> None:
        for stage in status.stages:
            key = (service, status.boot_id, stage.name)
            before = self._stages.get(key, status_pb2.STAGE_STATE_PENDING)
            if stage.state != before:
                self._stages[key] = stage.state
                if _is_followed(stage):
                    self.event(f"{service}: {_stage_line(stage)}")
        state = (status.boot_id, status.state)
        if self._states.get(service) != state:
            self._states[service] = state
            self.event(f"{service}: {state_name(status.state)}")

    def log(self, service: str, line: str) -> None:
        self._logs.write(service, line)

    def event(self, line: str) -> None:
        self._console.out(line, highlight=False)

    def failure(self, line: str) -> None:
        self.event(line)

    def ready(self) -> None:
        pass

    def close(self) -> None:
        self._logs.close()


class LiveDisplay:
    """A table of services and stages that is drawn again and again until all is ready; lines go
    above it.
    """

    def __init__(self, console: Console, logs: LogSink, services: Sequence[str]) -> None:
        self._console = console
        self._logs = logs
        self._statuses: dict[str, status_pb2.ServiceStatus | None] = dict.fromkeys(services)
        self._live = Live(
            console=console,
            get_renderable=self._table,
            refresh_per_second=REFRESHES_PER_SECOND,
        )
        self._live.start()

    def status(self, service: str, status: status_pb2.ServiceStatus) -> None:
        self._statuses[service] = status

    def log(self, service: str, line: str) -> None:
        self._logs.write(service, line)

    def event(self, line: str) -> None:
        self._console.out(line, style="bold", highlight=False)

    def failure(self, line: str) -> None:
        self._live.stop()
        self._console.out(line, style="bold red", highlight=False)

    def ready(self) -> None:
        self._live.stop()

    def close(self) -> None:
        self._live.stop()
        self._logs.close()

    def _table(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in ("service", "state", "stages"):
            table.add_column(column, no_wrap=column != "stages")
        for service, status in self._statuses.items():
            if status is None:
                table.add_row(service, Text("starting", style="dim"), "")
            else:
                state = state_name(status.state)
                table.add_row(
                    service, Text(state, style=STATE_STYLES.get(state, "yellow")), _stages(status)
                )
        return table


def _stages(status: status_pb2.ServiceStatus) -> Text:
    text = Text()
    for stage in filter(_is_followed, status.stages):
        state = stage_state_name(stage.state)
        text.append(stage.name, style=STAGE_STYLES[state])
        if state in ("running", "done", "failed"):
            text.append(f" {stage.seconds:.1f}s", style="dim")
        if state == "running" and stage.detail:
            text.append(f" {one_line(stage.detail)}", style="italic")
        text.append("  ")
    if status.HasField("failure"):
        text.append(f"\n{status.failure.stage}: {one_line(status.failure.reason)}", style="red")
    return text


def _is_followed(stage: status_pb2.Stage) -> bool:
    return stage.name in STARTUP_STAGES or stage.state == status_pb2.STAGE_STATE_FAILED


def _stage_line(stage: status_pb2.Stage) -> str:
    state = stage_state_name(stage.state)
    took = f" in {stage.seconds:.2f} s" if state in ("done", "failed") else ""
    detail = f": {one_line(stage.detail)}" if stage.detail else ""
    return f"{stage.name} {state}{took}{detail}"
