"""One service as a child process: started, watched, stopped, started again.

It passes on log lines, statuses and the exit; it does not know what they mean for the others.
"""

import asyncio
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.cli.words import exit_words, failure_words, stage_words
from outrider.serving.access import UNGUARDED, OwnAccess
from outrider.v1 import status_pb2, status_pb2_grpc

TETHER = Path(__file__).with_name("tether.py")
POLL_SECONDS = 0.05
# The last lines of a process that is gone may still be in the pipe.
LOG_GRACE_SECONDS = 1.0
# On top of the drain timeout, for everything else that a stop takes.
STOP_MARGIN_SECONDS = 5.0
TAIL_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildPlan:
    """How a service is started, the first time and every other time."""

    service: str
    arguments: tuple[str, ...]  # after the interpreter: -P -m target_service ...
    environment: Mapping[str, str]
    address: str  # host:port of its gRPC
    launch_timeout_seconds: float  # until its port is open
    drain_timeout_seconds: float
    access: OwnAccess = UNGUARDED


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """A service said something new about itself."""

    child: "Child"
    status: status_pb2.ServiceStatus


@dataclass(frozen=True, slots=True)
class Silent:
    """A service did not open its port in time."""

    child: "Child"


@dataclass(frozen=True, slots=True)
class Exited:
    """A service's process is gone."""

    child: "Child"


ChildEvent = StatusChanged | Silent | Exited


class Child:
    """Owned by the event loop. `status` is the last one heard of the present process."""

    def __init__(
        self,
        plan: ChildPlan,
        *,
        on_event: Callable[[ChildEvent], None],
        on_log: Callable[[str, str], None],
    ) -> None:
        self.plan = plan
        self.status: status_pb2.ServiceStatus | None = None
        self.serving_since: float | None = None
        self.starts = 0
        self._on_event = on_event
        self._on_log = on_log
        self._process: asyncio.subprocess.Process | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)

    @property
    def service(self) -> str:
        return self.plan.service

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def has_failed(self) -> bool:
        """It says so itself, or it is gone."""
        # Not the state: a failed service that is about to go says DRAINING.
        said = self.status is not None and self.status.HasField("failure")
        return said or not self.is_running

    async def start(self) -> None:
        """Starts a process. Ctrl-C in the terminal does not reach it: it has its own group."""
        assert not self.is_running
        self.status = None
        self.serving_since = None
        self.starts += 1
        self._tail.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(TETHER),
            str(os.getpid()),
            sys.executable,
            *self.plan.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=dict(self.plan.environment),
            process_group=0,
        )
        self._supervision = asyncio.create_task(self._supervise(self._process))

    async def stop(self) -> bool:
        """Lets it drain and waits for its end; False if it had to be killed."""
        if self._supervision is None:
            return True
        self._send(signal.SIGTERM)
        timeout = self.plan.drain_timeout_seconds + STOP_MARGIN_SECONDS
        done, _ = await asyncio.wait((self._supervision,), timeout=timeout)
        if not done:
            self.kill()
            await self._supervision
        return bool(done)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        self._send(signal.SIGKILL)

    def failure(self) -> str:
        """Stage and reason of a failure in one line, from the last that is known."""
        status = self.status
        if status is not None and status.HasField("failure"):
            return failure_words(status.failure)
        if self.is_running:
            return (
                f"stage launch: its port {self.plan.address} did not open within "
                f"{self.plan.launch_timeout_seconds:g} s"
            )
        assert self._process is not None and self._process.returncode is not None
        gone = exit_words(self._process.returncode)
        if status is not None:
            return f"stage {stage_words(status)}: {gone}"
        last = self._tail[-1] if self._tail else "it printed nothing"
        return f"stage launch: {gone} before its port was open: {last}"

    def death(self) -> str:
        """How it went, for a process that had been serving: `signal 9`, or with its own words."""
        assert self._process is not None and self._process.returncode is not None
        gone = exit_words(self._process.returncode)
        if self.status is not None and self.status.HasField("failure"):
            return f"{gone}; {failure_words(self.status.failure)}"
        return gone

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _supervise(self, process: asyncio.subprocess.Process) -> None:
        watching = asyncio.create_task(self._watch_status())
        logging = asyncio.create_task(self._read_log(process))
        await process.wait()
        await asyncio.wait((logging,), timeout=LOG_GRACE_SECONDS)
        for task in (watching, logging):
            task.cancel()
        await asyncio.gather(watching, logging, return_exceptions=True)
        self._on_event(Exited(self))

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        pending = b""
        while chunk := await process.stdout.read(2**16):
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                self._log(line)
        if pending:
            self._log(pending)

    def _log(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text:
            self._tail.append(text)
            self._on_log(self.service, text)

    async def _watch_status(self) -> None:
        """Follows WatchStatus until the service drains, through broken streams."""
        if not await self._port_opens():
            self._on_event(Silent(self))
            return
        access = self.plan.access
        async with access.open_channel(self.plan.address) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)  # type: ignore[no-untyped-call]
            while True:
                try:
                    async for status in stub.WatchStatus(
                        status_pb2.WatchStatusRequest(), metadata=access.metadata
                    ):
                        self._take(status)
                        if status.state == status_pb2.SERVICE_STATE_DRAINING:
                            # It waits for its open streams before it goes.
                            return
                except grpc.aio.AioRpcError:
                    # Whether the process is gone is for the process to say.
                    await asyncio.sleep(POLL_SECONDS)

    async def _port_opens(self) -> bool:
        host, _, port = self.plan.address.rpartition(":")
        deadline = time.monotonic() + self.plan.launch_timeout_seconds
        while time.monotonic() < deadline:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(POLL_SECONDS)
            else:
                writer.close()
                return True
        return False

    def _take(self, status: status_pb2.ServiceStatus) -> None:
        # A process that was started by somebody else on this port must not be taken for ours.
        if self._process is None or status.process_id != self._process.pid:
            return
        if status.state == status_pb2.SERVICE_STATE_SERVING and self.serving_since is None:
            self.serving_since = time.monotonic()
        self.status = status
        self._on_event(StatusChanged(self, status))
