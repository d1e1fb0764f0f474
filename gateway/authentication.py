"""Asks callers of REST and gRPC for their key, before anything of a request is read."""

from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.rest_errors import error_response
from outrider.serving.api_keys import ApiKeys
from outrider.serving.errors import Unauthenticated

# What balancers and orchestrators ask. They see states and reasons, no configuration.
OPEN_PATHS = frozenset(("/livez", "/readyz", "/health"))
OPEN_SERVICES = frozenset((health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,))


class RestAuthentication:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            try:
                self._api_keys.check(headers[0] if len(headers) == 1 else None)
            except Unauthenticated as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class GrpcAuthentication(grpc.aio.ServerInterceptor):
    """Health is open; everything else, status and reflection included, needs a key."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self._api_keys = api_keys

    async def intercept_service(  # type: ignore[override]
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[object, object]"]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[object, object]":
        """The RPC's own handler, or one that refuses it."""
        service = handler_call_details.method.rpartition("/")[0].removeprefix("/")
        if service not in OPEN_SERVICES:
            metadata = handler_call_details.invocation_metadata or ()
            shown = [value for name, value in metadata if name == "authorization"]
            try:
                self._api_keys.check(shown[0] if len(shown) == 1 else None)
            except Unauthenticated as error:
                return _refusing(str(error))
        return await continuation(handler_call_details)


def _refusing(words: str) -> "grpc.RpcMethodHandler[object, object]":
    async def refuse(
        request: object,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        await context.abort(Unauthenticated.code, words)

    return grpc.unary_unary_rpc_method_handler(refuse)
