"""Server-sent events to one client. A client that goes away ends the work for it at once."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
# A comment, which readers of event streams skip.
KEEP_ALIVE = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Value = TypeVar("Value")


class ClientGone(ConnectionError):
    """The client closed the connection before it had its answer."""


def event(body: dict[str, Any]) -> bytes:
    """One event."""
    return f"data: {json.dumps(body)}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Value]) -> Value:
    """The work's result. A client that goes away cancels it. Raises ClientGone.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.create_task(_client_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        was_done = working.done()
        working.cancel()
        await asyncio.wait((working, gone))
    if not was_done:
        # What it raised while it was being cancelled is of no interest to anyone.
        if not working.cancelled():
            working.exception()
        raise ClientGone
    return working.result()


class EventStream(Response):
    """Sends events as they come; sending waits for a slow client.

    `first` was made before anything was sent, so that an error could still be a status. After each
    `keep_alive_seconds` (0: never) without an event a comment is sent, so that no proxy gives up.
    """

    def __init__(
        self, first: bytes, events: AsyncGenerator[bytes, None], *, keep_alive_seconds: float
    ) -> None:
        super().__init__()
        self._first = first
        self._events = events
        self._keep_alive_seconds = keep_alive_seconds or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._send(send))
        except ClientGone:
            return

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events):
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": self._first, "more_body": True})
            while (chunk := await self._next(send)) is not None:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, send: Send) -> bytes | None:
        """The next event; None after the last."""
        coming = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                done, _ = await asyncio.wait((coming,), timeout=self._keep_alive_seconds)
                if done:
                    return coming.result()
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
        finally:
            # The generator can only be closed while nobody waits for its next event.
            coming.cancel()
            await asyncio.wait((coming,))
            if not coming.cancelled():
                coming.exception()


async def _client_gone(receive: Receive) -> None:
    message: Message = {}
    while message.get("type") != "http.disconnect":
        message = await receive()
