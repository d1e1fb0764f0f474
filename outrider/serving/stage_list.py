"""The stages of a start-up and the activities of a serving process, in order, with their seconds.

Not thread-safe: a Lifecycle owns it, under its lock.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.v1 import status_pb2


@dataclass(slots=True, kw_only=True)
class StageRecord:
    """One stage or activity. `started` is 0 before its first entry."""

    name: str
    state: status_pb2.StageState
    started: float = 0.0
    # Where the stage's time limit counts from.
    bounded_from: float = 0.0
    seconds: float = 0.0
    detail: str = ""

    @property
    def is_running(self) -> bool:
        return self.state == status_pb2.STAGE_STATE_RUNNING

    def start(self) -> None:
        """It is entered now."""
        self.state = status_pb2.STAGE_STATE_RUNNING
        self.started = self.bounded_from = time.monotonic()

    def end(self, state: status_pb2.StageState) -> None:
        """It is left now, in a state; one that was skipped stays so."""
        if self.started:
            self.seconds = time.monotonic() - self.started
        self.state = state

    def to_message(self) -> status_pb2.Stage:
        """With the seconds so far while it runs."""
        seconds = time.monotonic() - self.started if self.is_running else self.seconds
        return status_pb2.Stage(
            name=self.name, state=self.state, seconds=seconds, detail=self.detail
        )


class StageList:
    """All stages of a service from the start; activities from their first entry on."""

    def __init__(self, names: Sequence[str]) -> None:
        self._records = {
            name: StageRecord(name=name, state=status_pb2.STAGE_STATE_PENDING) for name in names
        }
        self.current = self._records[names[0]]

    def __iter__(self) -> Iterator[StageRecord]:
        return iter(self._records.values())

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def enter(self, name: str) -> None:
        """The next stage of start-up; the one before it is done."""
        self.leave()
        self.current = self._records[name]
        self.current.start()

    def leave(self) -> None:
        """The current stage of start-up is done."""
        if self.current.is_running:
            self.current.end(status_pb2.STAGE_STATE_DONE)

    def skip(self, reason: str) -> None:
        """The current stage has nothing to do."""
        self.current.end(status_pb2.STAGE_STATE_SKIPPED)
        self.current.detail = reason

    def add(self, name: str) -> StageRecord:
        """An activity that is entered for the first time."""
        record = StageRecord(name=name, state=status_pb2.STAGE_STATE_PENDING)
        record.start()
        self._records[name] = record
        return record

    def fail(self, name: str) -> None:
        """A stage or activity in which the service failed; others than the known ones are not
        listed.
        """
        record = self._records.get(name)
        if record is not None:
            record.end(status_pb2.STAGE_STATE_FAILED)
