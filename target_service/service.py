"""The target service as the server runs it: engine thread, link, drain."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import grpc

from outrider.serving.lifecycle import Lifecycle
from outrider.serving.network import tls_exposure
from outrider.v1 import target_pb2, target_pb2_grpc
from target_service.boot import Target, boot_target
from target_service.config import TargetConfig
from target_service.draft_link import DraftLink
from target_service.servicer import TargetServicer
from target_service.step_loop import StepLoop

logger = logging.getLogger(__name__)

DRAIN_POLL_SECONDS = 0.02


class TargetService:
    """Implements serving.server.Service."""

    def __init__(self, config: TargetConfig, lifecycle: Lifecycle[Target]) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._servicer = TargetServicer(lifecycle)
        # Set by `start`; the boot thread waits for it.
        self._loop: Future[asyncio.AbstractEventLoop] = Future()
        self._running: list[Target] = []
        self._links: list[Future[None]] = []

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        target_pb2_grpc.add_TargetServiceServicer_to_server(  # type: ignore[no-untyped-call]
            self._servicer, server
        )
        return [target_pb2.DESCRIPTOR.services_by_name["TargetService"].full_name]

    def exposure(self) -> Sequence[str]:
        return (tls_exposure(self._config.tls),)

    async def start(self) -> None:
        self._loop.set_result(asyncio.get_running_loop())

    def boot(self) -> None:
        target = boot_target(self._config, self._lifecycle, self._run_link)
        threading.Thread(
            target=self._lifecycle.guard, args=(target.step_loop.run,), name="engine", daemon=True
        ).start()
        self._running.append(target)
        self._lifecycle.serve(target)

    async def drain(self, timeout_seconds: float) -> None:
        """Rejects what is new, waits until what runs has ended and every report is written."""
        deadline = time.monotonic() + timeout_seconds
        for target in self._running:
            target.step_loop.submit(lambda loop: loop.stop_admitting())
            while self._lifecycle.is_draining and time.monotonic() < deadline:
                # Behind everything that was submitted before, and behind the reports of the step.
                await self._run_on_engine(target, deadline)
                if not target.scheduler.has_work:
                    break
                await asyncio.sleep(DRAIN_POLL_SECONDS)
            if target.scheduler.has_work:
                logger.warning("target: sequences still run")
        if not self._lifecycle.is_draining:
            return
        try:
            async with asyncio.timeout(max(deadline - time.monotonic(), 0.0)):
                await self._servicer.flush()
        except TimeoutError:
            logger.warning("target: reports are still unread after %g s", timeout_seconds)

    async def _run_on_engine(self, target: Target, deadline: float) -> None:
        """Returns once the engine has come to its commands, or has failed, or the time is over."""
        loop = asyncio.get_running_loop()
        reached = asyncio.Event()

        def reach(step_loop: StepLoop) -> None:
            loop.call_soon_threadsafe(reached.set)

        target.step_loop.submit(reach)
        while not reached.is_set() and self._lifecycle.is_draining and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        for link in self._links:
            link.cancel()

    def _run_link(self, link: DraftLink) -> None:
        future = asyncio.run_coroutine_threadsafe(link.run(), self._loop.result())
        future.add_done_callback(self._link_ended)
        self._links.append(future)

    def _link_ended(self, future: "Future[None]") -> None:
        if not future.cancelled():
            error = future.exception()
            self._lifecycle.fail("link", f"{type(error).__name__}: {error}")
