"""Coroutines that live and die together."""

import asyncio
from collections.abc import Coroutine
from typing import Any


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Runs all until one returns or raises, then cancels the others and waits for them.

    Raises what the first one raised. Unlike asyncio.TaskGroup, which on Python 3.11 leaves its
    parent marked as cancelled when a child fails, it tells a failure from a cancellation.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
