"""grpc.health.v1 over a Lifecycle: SERVING only while the lifecycle is, for every name alike.

The stock servicers are not used: they start out SERVING, and the asyncio one forgets its watchers
when one leaves.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.serving.lifecycle import Lifecycle


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers Check and Watch from the lifecycle's own state; nothing is stored twice."""

    def __init__(self, lifecycle: Lifecycle[Any], service_names: Sequence[str]) -> None:
        self._lifecycle = lifecycle
        self._names = ("", *service_names)

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            is_last = self._lifecycle.is_over
            revision = self._lifecycle.revision
            status = self._status(request.service)
            if status != last:
                yield health_pb2.HealthCheckResponse(status=status)
                last = status
            if is_last:
                return
            await self._lifecycle.changed_since(revision)

    def _status(self, name: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
        if name not in self._names:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._lifecycle.is_healthy:
            return health_pb2.HealthCheckResponse.SERVING
        return health_pb2.HealthCheckResponse.NOT_SERVING
