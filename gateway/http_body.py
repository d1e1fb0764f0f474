"""The JSON body of a request: bounded, UTF-8, without what JSON does not have."""

import json
from typing import NoReturn

from starlette.requests import ClientDisconnect, Request

from gateway.rest_errors import BodyTooLarge
from outrider.serving.errors import InvalidArgument

__all__ = ["ClientDisconnect", "read_json"]


async def read_json(request: Request, max_bytes: int) -> object:
    """Raises BodyTooLarge, InvalidArgument, and ClientDisconnect if nobody is there any more."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BodyTooLarge(f"the body has more than {max_bytes} bytes (--max-request-bytes)")
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        shown = bytes(body[error.start : error.start + 8])
        raise InvalidArgument(f"byte {error.start} of the body", shown, "UTF-8") from error
    except RecursionError as error:
        raise InvalidArgument("the body", "nested too deep", "flat enough to parse") from error
    except ValueError as error:
        raise InvalidArgument("the body", str(error), "JSON") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
