"""The real draft service in the test's own process and event loop, on a free port."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import grpc

from draft_service.boot import BootedDrafter, boot_drafter
from draft_service.config import DraftConfig
from draft_service.service import BootDrafter, DraftService, create_lifecycle
from outrider.serving.channel import SERVER_OPTIONS
from outrider.serving.lifecycle import Lifecycle
from outrider.v1 import status_pb2

PATIENCE_SECONDS = 20.0

Result = TypeVar("Result")


@dataclass
class Running:
    """A service under test."""

    address: str
    service: DraftService
    lifecycle: Lifecycle
    drafter: object

    def count_of(self, reason: str) -> int:
        return self.service.counters.of(reason)


@asynccontextmanager
async def running(
    *, boot: BootDrafter = boot_drafter, **configuration: object
) -> AsyncIterator[Running]:
    """Serves until the block is left; n-grams unless another drafter is named."""
    config = DraftConfig(port=0, **{"draft": "ngram", **configuration})
    lifecycle = create_lifecycle(config)
    booted: list[BootedDrafter] = []

    def boot_and_keep(config: DraftConfig, report: Lifecycle) -> BootedDrafter:
        booted.append(boot(config, report))
        return booted[0]

    service = DraftService(config=config, lifecycle=lifecycle, boot_drafter=boot_and_keep)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start()
    thread = threading.Thread(target=lifecycle.guard, args=(service.boot,), daemon=True)
    thread.start()
    await until(lambda: lifecycle.state >= status_pb2.SERVICE_STATE_SERVING)
    assert lifecycle.is_serving, lifecycle.words()
    try:
        yield Running(
            address=f"127.0.0.1:{port}",
            service=service,
            lifecycle=lifecycle,
            drafter=booted[0].drafter,
        )
    finally:
        await service.stop()
        await server.stop(0.2)
        await asyncio.to_thread(thread.join, PATIENCE_SECONDS)
        assert not thread.is_alive()


async def until(is_so: Callable[[], bool]) -> None:
    """Returns once `is_so()`; fails the test if that takes too long."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_SECONDS
    while not is_so():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.002)


@cache
def runner() -> asyncio.Runner:
    """One event loop for all tests: gRPC's poller trips over events of a loop that is closed."""
    return asyncio.Runner()


def run(scenario: Coroutine[object, object, Result]) -> Result:
    """Runs a test's coroutine."""
    return runner().run(asyncio.wait_for(scenario, 60))
