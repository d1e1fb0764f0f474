"""Waiting for a condition over values that one event loop changes."""

import asyncio
from collections.abc import Callable


class Changes:
    """Whoever changes a value calls `notify`; whoever waits has its condition looked at again."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Something is different."""
        self._next.set()
        self._next = asyncio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once the condition holds."""
        while not condition():
            await self._next.wait()

    async def until_within(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Returns as soon as the condition holds, or after so many seconds; does it hold?"""
        try:
            async with asyncio.timeout(seconds):
                await self.until(condition)
        except TimeoutError:
            return condition()
        return True
