"""The JSON body of a request: bounded, UTF-8, without what JSON does not have."""

import asyncio
import json
from dataclasses import dataclass
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from gateway.rest_errors import BodyTooLarge, BodyTooSlow
from outrider.serving.errors import InvalidArgument

__all__ = ["BodyLimits", "ClientDisconnect", "read_json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """How much a client may send, and how long it may take over that."""

    max_bytes: int
    timeout_seconds: float


async def read_json(request: Request, limits: BodyLimits) -> object:
    """Raises BodyTooLarge, BodyTooSlow, InvalidArgument, and ClientDisconnect if nobody is there
    any more.
    """
    try:
        async with asyncio.timeout(limits.timeout_seconds):
            body = await _read(request, limits.max_bytes)
    except TimeoutError as error:
        raise BodyTooSlow(
            f"the body is not complete after {limits.timeout_seconds:g} s (--request-body-timeout)"
        ) from error
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        shown = bytes(body[error.start : error.start + 8])
        raise InvalidArgument(f"byte {error.start} of the body", shown, "UTF-8") from error
    except RecursionError as error:
        raise InvalidArgument("the body", "nested too deep", "flat enough to parse") from error
    except ValueError as error:
        raise InvalidArgument("the body", str(error), "JSON") from error


async def _read(request: Request, max_bytes: int) -> bytearray:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes (--max-request-bytes)")
    return body


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
