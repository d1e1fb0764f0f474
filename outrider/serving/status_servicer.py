"""StatusService over a Lifecycle."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.serving.lifecycle import Lifecycle
from outrider.v1 import status_pb2, status_pb2_grpc


class StatusServicer(status_pb2_grpc.StatusServiceServicer):
    """Answers in every state, FAILED included."""

    def __init__(self, lifecycle: Lifecycle[Any]) -> None:
        self._lifecycle = lifecycle

    async def GetStatus(
        self,
        request: status_pb2.GetStatusRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> status_pb2.ServiceStatus:
        return self._lifecycle.status()

    async def WatchStatus(
        self,
        request: status_pb2.WatchStatusRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[status_pb2.ServiceStatus]:
        while True:
            revision = self._lifecycle.revision
            is_last = self._lifecycle.is_over
            yield self._lifecycle.status()
            if is_last:
                return
            await self._lifecycle.changed_since(revision)
