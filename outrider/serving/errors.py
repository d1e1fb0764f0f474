"""Errors that cross a service's edge, each with the gRPC code that a caller sees.

ServiceError
  InvalidArgument     a field of a request is wrong: field, value, bound
  NotServing          not ready, draining or failed: try again or elsewhere
  Overloaded          a bounded queue is full: try again later
  Unauthenticated     no key, or one that is not known
ConfigurationError    a flag, a variable or a combination of them is wrong (never crosses the wire)
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc


class ConfigurationError(ValueError):
    """A flag, an environment variable or a combination of them is wrong."""


class ServiceError(Exception):
    """An error that a caller is told about, by code and in words."""

    code = grpc.StatusCode.INTERNAL


class InvalidArgument(ServiceError):
    """A field of a request is wrong. The text names the field, the value and the bound."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, bound: str) -> None:
        shown = repr(value)
        if len(shown) > 80:
            shown = f"{shown[:77]}..."
        super().__init__(f"{field} is {shown}, must be {bound}")
        self.field = field


class NotServing(ServiceError):
    """The service cannot take this now."""

    code = grpc.StatusCode.UNAVAILABLE


class Overloaded(ServiceError):
    """A bounded queue is full."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Unauthenticated(ServiceError):
    """The caller did not show a key that is known."""

    code = grpc.StatusCode.UNAUTHENTICATED


@asynccontextmanager
async def rpc_errors(context: "grpc.aio.ServicerContext") -> AsyncIterator[None]:  # type: ignore[type-arg]
    """Ends an RPC with the code and the text of a ServiceError raised inside."""
    try:
        yield
    except ServiceError as error:
        await context.abort(error.code, str(error))
