"""Keeps the children together: start-up to readiness, restarts with back-off, orderly stop.

One queue of events, handled one after the other. It does not know what the services do, nor how
the progress is drawn.
"""

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

import httpx

from outrider.cli.child import Child, ChildEvent, ChildPlan, Exited, Silent, StatusChanged
from outrider.cli.progress import Display
from outrider.serving.access import OwnAccess
from outrider.v1 import status_pb2

POLL_PERIOD_SECONDS = 0.1
POLL_TIMEOUT_SECONDS = 2.0
# How long the other services wait for a gateway that is started before them.
GATEWAY_HEAD_START_SECONDS = 10.0
# Failures pull others along; the cause is looked for among all that come within this time.
SETTLING_SECONDS = 0.4
FIRST_RESTART_DELAY_SECONDS = 0.5
LONGEST_RESTART_DELAY_SECONDS = 30.0
# After so long in SERVING, the next death starts again at the shortest delay.
STABLE_SECONDS = 30.0
EXIT_CODE_OF_FAILURE = 1
EXIT_CODE_OF_KILL = 130


@dataclass(frozen=True, slots=True)
class Ready:
    """The gateway's /readyz answered 200."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Ctrl-C, SIGTERM or SIGHUP."""


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What was to be done while the services are up has ended."""

    task: asyncio.Task[int]


Event = ChildEvent | Ready | StopRequested | WorkDone


class Supervisor:
    """Owned by the event loop that runs it; runs once.

    `plans` are in the order in which a failure is put down to a service (target, draft, gateway).
    """

    def __init__(
        self,
        *,
        plans: Sequence[ChildPlan],
        url: str,
        access: OwnAccess,
        holds_failures: bool,
        display: Display,
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children = [
            Child(plan, on_event=self._events.put_nowait, on_log=display.log) for plan in plans
        ]
        self._url = url
        self._access = access.http()
        self._holds_failures = holds_failures
        self._display = display
        self._restart_delays = dict.fromkeys(
            (plan.service for plan in plans), FIRST_RESTART_DELAY_SECONDS
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_requests = 0
        # Service, number of its start, state.
        self._told: set[tuple[str, int, int]] = set()

    async def run(self, work: Callable[[str], Coroutine[object, object, int]]) -> int:
        """Starts all, calls `work(url)` once ready, stops all; returns the exit code.

        Ends early, with 0, when asked to stop, and with 1 when a service fails its start-up.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._request_stop)
        try:
            await self._start_children()
            polling = self._spawn(self._poll_readiness())
            exit_code = await self._start_up()
            polling.cancel()
            if exit_code is None:
                self._display.ready()
                working = asyncio.create_task(work(self._url))
                working.add_done_callback(self._work_done)
                try:
                    exit_code = await self._keep_running()
                finally:
                    working.cancel()
        finally:
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._stop()
            for number in signals:
                loop.remove_signal_handler(number)
        return EXIT_CODE_OF_KILL if self._stop_requests > 1 else exit_code

    async def _start_children(self) -> None:
        """All at once; but where failures are held to be looked at, the gateway first, so that it
        sees even a service that dies at once and its /readyz can say where.
        """
        *others, gateway = self._children
        if self._holds_failures:
            await gateway.start()
            deadline = time.monotonic() + GATEWAY_HEAD_START_SECONDS
            while not await self._answers("livez") and time.monotonic() < deadline:
                await asyncio.sleep(POLL_PERIOD_SECONDS)
            for child in others:
                await child.start()
        else:
            for child in self._children:
                await child.start()

    async def _start_up(self) -> int | None:
        """None once ready, else the exit code."""
        told: set[str] = set()
        while True:
            event = await self._events.get()
            if isinstance(event, StopRequested):
                return EXIT_CODE_OF_FAILURE if told else 0
            if isinstance(event, Ready):
                return None
            if isinstance(event, StatusChanged):
                self._show(event)
            if isinstance(event, Silent) or (
                isinstance(event, StatusChanged | Exited) and event.child.has_failed
            ):
                if event.child.service in told:
                    continue
                if self._holds_failures:
                    told.add(event.child.service)
                    self._display.failure(
                        f"{event.child.service} failed in {event.child.failure()} "
                        f"(held: look at {self._url}/readyz, Ctrl-C stops)"
                    )
                else:
                    await self._settle()
                    cause = self._cause(event.child)
                    # The services' last log lines first: the cause comes last, where it is seen.
                    await self._stop()
                    self._display.failure(cause)
                    return EXIT_CODE_OF_FAILURE

    async def _settle(self) -> None:
        deadline = time.monotonic() + SETTLING_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            try:
                event = await asyncio.wait_for(self._events.get(), left)
            except TimeoutError:
                return
            if isinstance(event, StatusChanged):
                self._show(event)

    def _cause(self, first: Child) -> str:
        failed = [child for child in self._children if child is first or child.has_failed]
        cause, *others = (f"{child.service} failed in {child.failure()}" for child in failed)
        return "; then ".join((cause, *others))

    async def _keep_running(self) -> int:
        """Until asked to stop or the work is done; returns the exit code."""
        while True:
            event = await self._events.get()
            if isinstance(event, StopRequested):
                return 0
            if isinstance(event, WorkDone):
                return event.task.result()
            if isinstance(event, Exited):
                self._restart_later(event.child)
            elif isinstance(event, Silent):
                # It would stay so for ever; its exit starts it again.
                self._display.event(f"{event.child.service}: {event.child.failure()}, killing it")
                event.child.kill()
            elif isinstance(event, StatusChanged):
                self._show(event)
                self._tell_news(event)

    def _restart_later(self, child: Child) -> None:
        if child.serving_since and time.monotonic() - child.serving_since > STABLE_SECONDS:
            self._restart_delays[child.service] = FIRST_RESTART_DELAY_SECONDS
        delay = self._restart_delays[child.service]
        self._restart_delays[child.service] = min(2 * delay, LONGEST_RESTART_DELAY_SECONDS)
        self._display.event(f"{child.service} died ({child.death()}), restarting in {delay:g} s")
        self._spawn(self._restart(child, delay))

    async def _restart(self, child: Child, delay: float) -> None:
        await asyncio.sleep(delay)
        await child.start()

    def _tell_news(self, event: StatusChanged) -> None:
        """What of a status after readiness is worth a line: each once per process."""
        child = event.child
        if event.status.HasField("failure") and self._holds_failures:
            news = f"failed in {child.failure()} (held: look at {self._url}/readyz)"
        elif event.status.state == status_pb2.SERVICE_STATE_SERVING and child.starts > 1:
            news = "is SERVING again"
        else:
            return
        key = (child.service, child.starts, event.status.state)
        if key not in self._told:
            self._told.add(key)
            self._display.event(f"{child.service} {news}")

    async def _stop(self) -> None:
        """The gateway first, then the target, then the draft: each while those it asks still
        answer.
        """
        *others, gateway = self._children
        for child in (gateway, *others):
            if not await child.stop():
                self._display.event(
                    f"{child.service} did not stop within its drain timeout of "
                    f"{child.plan.drain_timeout_seconds:g} s and was killed"
                )

    def _request_stop(self) -> None:
        self._stop_requests += 1
        if self._stop_requests == 1:
            self._display.event("stopping (once more to kill)")
            self._events.put_nowait(StopRequested())
        else:
            for child in self._children:
                child.kill()

    async def _poll_readiness(self) -> None:
        while not await self._answers("readyz"):
            await asyncio.sleep(POLL_PERIOD_SECONDS)
        self._events.put_nowait(Ready())

    async def _answers(self, path: str) -> bool:
        """The gateway answers 200."""
        async with httpx.AsyncClient(
            trust_env=False,
            timeout=POLL_TIMEOUT_SECONDS,
            headers=self._access.headers,
            verify=self._access.verify,
        ) as client:
            try:
                response = await client.get(f"{self._url}/{path}")
            except httpx.HTTPError:
                return False
        return response.status_code == httpx.codes.OK

    def _show(self, event: StatusChanged) -> None:
        self._display.status(event.child.service, event.status)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _work_done(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            self._events.put_nowait(WorkDone(task))
