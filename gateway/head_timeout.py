"""HTTP connections on which a request's head may only take so long."""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_SECONDS = 10.0


class HeadTimeoutProtocol(H11Protocol):
    """Closes a connection whose request line and headers are not complete in time.

    The clock starts with the connection, and on one that is kept alive with the first bytes of its
    next request; while none have come uvicorn's own bound for idle connections holds.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Starts the clock."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Stops the clock once a head is complete."""
        super().data_received(data)
        self._watch_head()

    def on_response_complete(self) -> None:
        """Starts the clock if a part of the next head has come already."""
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the clock."""
        self._stop_head_timer()
        super().connection_lost(exc)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_head_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            # uvicorn's timer for idle connections ends with the first bytes.
            self._start_head_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_SECONDS, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
