"""A number that grows with every change, and coroutines on any event loop that wait for it."""

import asyncio
import threading


class Revision:
    """Thread-safe. Every waiter has an event of its own, so that none misses a change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value = 0
        self._waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    @property
    def value(self) -> int:
        """Grows with every change."""
        return self._value

    def bump(self) -> None:
        """Something has changed."""
        with self._lock:
            self._value += 1
            for loop, event in self._waiters:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)
            self._waiters.clear()

    async def after(self, value: int) -> None:
        """Returns once `value` is no longer the latest."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            if self._value != value:
                return
            self._waiters.add(waiter)
        try:
            await waiter[1].wait()
        finally:
            with self._lock:
                self._waiters.discard(waiter)
