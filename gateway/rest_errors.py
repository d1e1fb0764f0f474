"""Errors as OpenAI's clients understand them: a status, and {"error": {...}}."""

import json
import math
from typing import Any

import grpc
from starlette.responses import Response

from gateway.generator import UnknownModel
from outrider.serving.errors import InvalidArgument, Overloaded, ServiceError

# How soon a client may ask again while the gateway is not ready: a service that restarts loads its
# model for some seconds.
NOT_READY_RETRY_SECONDS = 5

_STATUSES = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "invalid_request_error"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (408, "invalid_request_error"),
    grpc.StatusCode.UNAVAILABLE: (503, "service_unavailable_error"),
}


class BodyTooLarge(ServiceError):
    """The body of a request is above the limit."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class BodyTooSlow(ServiceError):
    """The body of a request did not come in time."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


def error_object(error: ServiceError) -> dict[str, Any]:
    """The body of an error answer, and the event that ends a stream that cannot be completed."""
    status, kind = _STATUSES[error.code]
    code: str | None = None
    if isinstance(error, UnknownModel):
        code = "model_not_found"
    elif status == 401:
        code = "invalid_api_key"
    elif status == 408:
        code = "request_timeout"
    elif status == 429:
        code = "overloaded"
    elif status == 503:
        code = "not_ready"
    elif isinstance(error, InvalidArgument):
        code = "invalid_value"
    param = error.field if isinstance(error, InvalidArgument) else None
    return {"error": {"message": str(error), "type": kind, "param": param, "code": code}}


def error_response(error: ServiceError) -> Response:
    """The answer to a request that failed before anything was sent."""
    status, _ = _STATUSES[error.code]
    if isinstance(error, BodyTooLarge):
        status = 413
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_seconds))
    elif status == 401:
        headers["www-authenticate"] = "Bearer"
    elif status == 408:
        # The rest of the body may still come: it must not be taken for the next request.
        headers["connection"] = "close"
    elif status == 503:
        headers["retry-after"] = str(NOT_READY_RETRY_SECONDS)
    return json_response(error_object(error), status, headers)


def json_response(
    body: object, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A JSON answer in ASCII, so that whatever a client sent can be shown back to it."""
    return Response(json.dumps(body), status, headers, media_type="application/json")
