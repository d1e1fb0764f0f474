"""Runs one service: opens the port first, boots behind it, tells a failure to the watchers, drains
on SIGTERM.

It does not know what the service does.
"""

import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.serving.channel import SERVER_OPTIONS
from outrider.serving.config import ServiceConfig
from outrider.serving.errors import ConfigurationError
from outrider.serving.health import HealthServicer
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.network import is_loopback
from outrider.serving.status_servicer import StatusServicer
from outrider.serving.tls import server_credentials
from outrider.v1 import status_pb2, status_pb2_grpc

logger = logging.getLogger(__name__)

WATCHDOG_PERIOD_SECONDS = 0.05
# A failed process stays for so long, so that its watchers and its supervisor hear why.
FAILURE_GRACE_SECONDS = 0.5
STOP_GRACE_SECONDS = 0.5
EXIT_CODE_OF_FAILURE = 1


class Service(Protocol):
    """One of the three services, as seen from here. Nothing is constructed half: it boots or it
    fails.
    """

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds its servicers; returns the full names of their services."""

    def exposure(self) -> Sequence[str]:
        """What keeps strangers out and what does not, in words for an operator who opens the
        ports to others.
        """

    async def start(self) -> None:
        """Starts what must answer before boot has ended, on the event loop."""

    def boot(self) -> None:
        """The start-up, in a daemon thread; ends with Lifecycle.serve."""

    async def drain(self, timeout_seconds: float) -> None:
        """Lets what runs finish, within the time."""

    async def stop(self) -> None:
        """Ends what `start` started."""


def configure_logging(service: str, level: str) -> None:
    """One line a record on standard error."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {service} %(levelname)s %(message)s",
    )


def run_service(
    service: Service,
    lifecycle: Lifecycle[Any],
    config: ServiceConfig,
    port: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
) -> NoReturn:
    """Runs until SIGTERM, SIGINT or a failure, then leaves the process with 0 or non-zero."""
    # A busy engine thread must not keep the event loop from the interpreter for the default 5 ms.
    sys.setswitchinterval(2e-4)
    exit_code = asyncio.run(_run(service, lifecycle, config, port, interceptors))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a boot or engine thread that hangs inside native code would keep the process
    # for ever.
    os._exit(exit_code)


async def _run(
    service: Service,
    lifecycle: Lifecycle[Any],
    config: ServiceConfig,
    port: int,
    interceptors: Sequence[grpc.aio.ServerInterceptor],
) -> int:
    stop_requested = asyncio.Event()

    def request_stop() -> None:
        if stop_requested.is_set():
            # Asked twice: whoever asks does not want to wait for the drain.
            os._exit(EXIT_CODE_OF_FAILURE)
        stop_requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, request_stop)

    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=interceptors)
    names = [
        *service.register(server),
        status_pb2.DESCRIPTOR.services_by_name["StatusService"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
    ]
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(lifecycle, names), server)
    status_pb2_grpc.add_StatusServiceServicer_to_server(  # type: ignore[no-untyped-call]
        StatusServicer(lifecycle), server
    )
    reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), server)
    address = f"{config.host}:{port}"
    try:
        credentials = server_credentials(config.tls)
        if credentials is None:
            bound_port = server.add_insecure_port(address)
        else:
            bound_port = server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error}") from error
    await server.start()
    logger.info("%s: gRPC on %s:%d", lifecycle.service, config.host, bound_port)
    if not is_loopback(config.host):
        logger.warning(
            "%s: listens beyond this machine, on %s, %s",
            lifecycle.service,
            config.host,
            ", ".join(service.exposure()),
        )
    await service.start()
    # Daemon threads: a SIGTERM during a long load is honoured at once.
    threading.Thread(target=lifecycle.guard, args=(service.boot,), name="boot", daemon=True).start()
    threading.Thread(target=_watch, args=(lifecycle,), name="watchdog", daemon=True).start()

    failed = asyncio.create_task(_wait_for_failure(lifecycle))
    stopping = asyncio.create_task(stop_requested.wait())
    await asyncio.wait((failed, stopping), return_when=asyncio.FIRST_COMPLETED)
    if not stop_requested.is_set():
        if config.on_startup_failure == "hold":
            logger.error("%s: held up to be looked at", lifecycle.service)
            await stopping
        else:
            await asyncio.sleep(FAILURE_GRACE_SECONDS)
    was_serving = lifecycle.is_serving
    lifecycle.drain()
    if was_serving:
        logger.info("%s: draining", lifecycle.service)
        await service.drain(config.drain_timeout)
    await service.stop()
    lifecycle.end()
    await server.stop(STOP_GRACE_SECONDS)
    failed.cancel()
    logger.info("%s: stopped", lifecycle.service)
    has_failed = lifecycle.state == status_pb2.SERVICE_STATE_FAILED
    return EXIT_CODE_OF_FAILURE if has_failed else 0


async def _wait_for_failure(lifecycle: Lifecycle[Any]) -> None:
    while lifecycle.state != status_pb2.SERVICE_STATE_FAILED:
        revision = lifecycle.revision
        if lifecycle.state != status_pb2.SERVICE_STATE_FAILED:
            await lifecycle.changed_since(revision)


def _watch(lifecycle: Lifecycle[Any]) -> None:
    while True:
        time.sleep(WATCHDOG_PERIOD_SECONDS)
        lifecycle.check_timeouts()
