"""Watches one service's status for as long as the gateway runs, and keeps what it said last.

A killed peer ends the stream of statuses; a stopped one goes on holding it, so it is also asked
again and again, and counts as lost when it does not answer. Belongs to the event loop.
"""

import asyncio
import logging
from collections.abc import Callable

import grpc

from gateway.peer_view import GONE, NO_ANSWER, UNREACHABLE, ServiceView, live_view, lost_view
from outrider.serving.channel import open_channel
from outrider.v1 import status_pb2, status_pb2_grpc

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 0.2


class Peer:
    """One service at one address. `on_change` is called after every change of what is known."""

    def __init__(
        self,
        service: str,
        address: str,
        *,
        credentials: grpc.ChannelCredentials | None,
        timeout_seconds: float,
        on_change: Callable[[], None],
    ) -> None:
        self.service = service
        self.address = address
        self._credentials = credentials
        self._timeout_seconds = timeout_seconds
        self._on_change = on_change
        self._status: status_pb2.ServiceStatus | None = None
        # Why it does not answer; None while it does.
        self._lost: tuple[str, str] | None = (UNREACHABLE, f"not reached yet at {address}")

    @property
    def view(self) -> ServiceView:
        """State, stage and reason now."""
        if self._lost is None:
            assert self._status is not None
            return live_view(self.service, self._status)
        state, why = self._lost
        return lost_view(self.service, state, why, self._status)

    @property
    def last_status(self) -> status_pb2.ServiceStatus | None:
        """The last status that it sent, also once it is gone; None before the first."""
        return self._status

    @property
    def is_answering(self) -> bool:
        """The last status is the current one."""
        return self._lost is None

    @property
    def is_serving(self) -> bool:
        """It answers and says SERVING."""
        return self.view.is_serving

    @property
    def is_booting(self) -> bool:
        """It answers from within its start-up."""
        return self.is_answering and self.view.state in ("LOADING", "CAPTURING", "WARMING")

    @property
    def boot_id(self) -> int:
        """Of the process that answered last; 0 before the first."""
        return 0 if self._status is None else self._status.boot_id

    async def watch(self) -> None:
        """Runs until cancelled."""
        async with open_channel(self.address, self._credentials) as channel:
            stub = status_pb2_grpc.StatusServiceStub(channel)  # type: ignore[no-untyped-call]
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_status(stub))
                tasks.create_task(self._ask_again_and_again(stub))

    async def _watch_status(self, stub: status_pb2_grpc.StatusServiceStub) -> None:
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            try:
                async for status in stub.WatchStatus(status_pb2.WatchStatusRequest()):
                    retry_seconds = FIRST_RETRY_SECONDS
                    self._answered(status)
                self._missed("it ended the stream of its status")
            except grpc.aio.AioRpcError as error:
                self._missed(f"{error.code().name}: {error.details()}")
            await asyncio.sleep(retry_seconds)
            retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)

    async def _ask_again_and_again(self, stub: status_pb2_grpc.StatusServiceStub) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if self._lost is not None and self._lost[0] != NO_ANSWER:
                continue
            try:
                status = await stub.GetStatus(
                    status_pb2.GetStatusRequest(), timeout=self._timeout_seconds
                )
            except grpc.aio.AioRpcError as error:
                # A broken connection is the other task's to tell.
                if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                    self._set_lost(NO_ANSWER, f"for {self._timeout_seconds:g} s")
                continue
            self._answered(status)

    def _answered(self, status: status_pb2.ServiceStatus) -> None:
        before = None if self._lost is not None else self.view
        self._status = status
        self._lost = None
        now = self.view
        # A serving process enters activities all the time; only its state is news.
        if before is None or before.state != now.state or (not now.is_serving and before != now):
            logger.info("%s", now.words())
        self._on_change()

    def _missed(self, why: str) -> None:
        self._set_lost(UNREACHABLE if self._status is None else GONE, why)

    def _set_lost(self, state: str, why: str) -> None:
        was_lost = self._lost is not None and self._lost[0] == state
        self._lost = (state, why)
        if not was_lost:
            logger.warning("%s", self.view.words())
        self._on_change()
