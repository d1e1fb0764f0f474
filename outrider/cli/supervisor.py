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
from outrider.serving.stages import state_name
from outrider.v1 import status_pb2

READINESS_PERIOD_SECONDS = 0.1
READINESS_TIMEOUT_SECONDS = 2.0
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
        holds_failures: bool,
        display: Display,
    ) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._children = [
            Child(plan, on_event=self._events.put_nowait, on_log=display.log) for plan in plans
        ]
        self._url = url
        self._holds_failures = holds_failures
        self._display = display
        self._restart_delays = dict.fromkeys(
            (plan.service for plan in plans), FIRST_RESTART_DELAY_SECONDS
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_requests = 0

    async def run(self, work: Callable[[str], Coroutine[object, object, int]]) -> int:
        """Starts all, calls `work(url)` once ready, stops all; returns the exit code.

        Ends early, with 0, when asked to stop, and with 1 when a service fails its start-up.
        """
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for number in signals:
            loop.add_signal_handler(number, self._request_stop)
        try:
            for child in self._children:
                await child.start()
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
                self._show(event.child)
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
                self._show(event.child)

    def _cause(self, first: Child) -> str:
        failed = [child for child in self._children if child is first or child.has_failed]
        cause, *others = (f"{child.service} failed in {child.failure()}" for child in failed)
        return "; then ".join((cause, *others))

    async def _keep_running(self) -> int:
        """Until asked to stop or the work is done; returns the exit code."""
        announced = {child.service: child.starts for child in self._children}
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
                self._show(event.child)
                self._tell_restarted(event.child, announced)

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

    def _tell_restarted(self, child: Child, announced: dict[str, int]) -> None:
        assert child.status is not None
        if child.status.state == status_pb2.SERVICE_STATE_FAILED and self._holds_failures:
            if announced[child.service] != -child.starts:
                announced[child.service] = -child.starts
                self._display.event(
                    f"{child.service} failed in {child.failure()} "
                    f"(held: look at {self._url}/readyz)"
                )
        elif child.status.state == status_pb2.SERVICE_STATE_SERVING:
            if child.starts > abs(announced[child.service]):
                announced[child.service] = child.starts
                self._display.event(f"{child.service} is {state_name(child.status.state)} again")

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
        async with httpx.AsyncClient(trust_env=False, timeout=READINESS_TIMEOUT_SECONDS) as client:
            while True:
                try:
                    response = await client.get(f"{self._url}/readyz")
                except httpx.HTTPError:
                    is_ready = False
                else:
                    is_ready = response.status_code == httpx.codes.OK
                if is_ready:
                    self._events.put_nowait(Ready())
                    return
                await asyncio.sleep(READINESS_PERIOD_SECONDS)

    def _show(self, child: Child) -> None:
        assert child.status is not None
        self._display.status(child.service, child.status)

    def _spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _work_done(self, task: asyncio.Task[int]) -> None:
        if not task.cancelled():
            self._events.put_nowait(WorkDone(task))
