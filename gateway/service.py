"""The gateway as a service: what starts first, the start-up's straight line, and the end."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

import grpc

from gateway.authentication import GrpcAuthentication
from gateway.boot import check_config, load_text_model
from gateway.cluster import Cluster
from gateway.completions import Completions
from gateway.config import GatewayConfig
from gateway.connector import Connector
from gateway.generator import Gateway, Generator
from gateway.http_body import BodyLimits
from gateway.model import TextModel
from gateway.rest import Operations, rest_app
from gateway.rest_server import RestServer, listen, rest_server
from gateway.servicer import SERVICE_NAME, GenerationServicer, add_generation_servicer
from gateway.startup import StartUp
from gateway.stats import Statistics
from gateway.supervisor import Supervisor
from gateway.tokenization import Tokenization
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.network import tls_exposure
from outrider.serving.tls import channel_credentials

logger = logging.getLogger(__name__)

STOP_SECONDS = 2
DRAIN_POLL_SECONDS = 0.05

Result = TypeVar("Result")


class GatewayService:
    """`start` opens the REST port and watches the peers; `boot` does the rest."""

    def __init__(
        self,
        config: GatewayConfig,
        lifecycle: Lifecycle[Gateway],
        load: Callable[[str], TextModel] = load_text_model,
    ) -> None:
        self._config = config
        self._load = load
        self._lifecycle = lifecycle
        self._statistics = Statistics()
        self.cluster = Cluster(config, lifecycle, channel_credentials(config.tls))
        self._api_keys = config.load_api_keys()
        self._generator = Generator(
            lifecycle=lifecycle, cluster=self.cluster, statistics=self._statistics
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._supervising: set[asyncio.Task[None]] = set()
        self._running: _Running | None = None
        self._is_stopped = False
        # What the boot thread waits for on the loop.
        self._waited_for: Future[Any] | None = None

    @property
    def rest_port(self) -> int:
        """The REST port in use; there is one once `start` has returned."""
        return self._started().rest_port

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """GenerationService; answers UNAVAILABLE until the gateway is ready."""
        add_generation_servicer(GenerationServicer(self._generator), server)
        return (SERVICE_NAME,)

    @property
    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """What every RPC passes first."""
        return (GrpcAuthentication(self._api_keys),) if self._api_keys.are_required else ()

    def exposure(self) -> Sequence[str]:
        """What is asked of callers, in words."""
        keys = "with API keys" if self._api_keys.are_required else "WITHOUT API keys"
        return tls_exposure(self._config.tls), keys

    async def start(self) -> None:
        """Opens the REST port, which answers from now on, and watches the peers.

        Raises ConfigurationError if the port is taken.
        """
        listener = listen(self._config.host, self._config.rest_port)
        operations = Operations(
            config=self._config,
            lifecycle=self._lifecycle,
            cluster=self.cluster,
            statistics=self._statistics,
            generator=self._generator,
        )
        limits = BodyLimits(
            max_bytes=self._config.max_request_bytes,
            timeout_seconds=self._config.request_body_timeout,
        )
        rest = rest_server(
            rest_app(
                operations,
                Completions(
                    self._generator,
                    body_limits=limits,
                    keep_alive_seconds=self._config.stream_keep_alive,
                ),
                Tokenization(self._generator, body_limits=limits),
                cors_origins=self._config.cors_origin_list,
                api_keys=self._api_keys,
            ),
            tls=self._config.tls,
            shutdown_seconds=STOP_SECONDS,
        )
        self._running = _Running(
            loop=asyncio.get_running_loop(),
            rest=rest,
            rest_task=self._keep(rest.serve(sockets=[listener]), "rest"),
            listener=listener,
        )
        logger.info("gateway: REST on %s:%d", self._config.host, self.rest_port)
        for peer in self.cluster.peers:
            self._keep(peer.watch(), f"watch {peer.service}")
        self._keep(self._show_in_health(), "health")

    async def _show_in_health(self) -> None:
        """Balancers that only ask grpc.health.v1 must not route to a gateway without a target."""
        while True:
            is_usable = self.cluster.is_usable
            self._lifecycle.set_usable(is_usable)
            await self.cluster.changes.until(
                lambda: self.cluster.is_usable != is_usable  # noqa: B023
            )

    def boot(self) -> None:
        """The stages, in order, in a thread of their own. Ends early if the gateway is stopped."""
        try:
            self._boot()
        except CancelledError:
            logger.info("gateway: start-up was cut short")

    def _boot(self) -> None:
        lifecycle = self._lifecycle
        lifecycle.enter("config")
        check_config(self._config)
        lifecycle.enter("tokenizer")
        text_model = self._load(self._config.model)
        connector = Connector(
            config=self._config,
            cluster=self.cluster,
            text_model=text_model,
            statistics=self._statistics,
            gateway_boot_id=lifecycle.boot_id,
            on_task_end=self._task_ended,
        )
        start_up = StartUp(connector)
        lifecycle.enter("connect")
        self._on_loop(start_up.wait_for_peers(lifecycle.note, lifecycle.touch))
        lifecycle.enter("handshake")
        model = self._on_loop(start_up.handshake(lifecycle.note))
        lifecycle.enter("canary")
        report = self._on_loop(start_up.first_canary(model, lifecycle.note))
        lifecycle.describe(
            model_fingerprint=model.fingerprint,
            device="cpu",
            limits={
                "model": model.name,
                "max_sequence_length": str(model.max_sequence_length),
                "max_draft_length": str(model.max_draft_length),
                "rest_port": str(self.rest_port),
            },
        )
        lifecycle.serve(Gateway(text_model=text_model, canary=report))
        self._on_loop(self._supervise(Supervisor(connector)))

    async def drain(self, timeout_seconds: float) -> None:
        """Waits for the answers under way; new requests are refused by now."""
        deadline = time.monotonic() + timeout_seconds
        while self.cluster.unfinished_count and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def stop(self) -> None:
        """Ends answers that are still under way with an error, then REST and every task."""
        # First, so that nobody connects again.
        self._is_stopped = True
        await _end(self._supervising)
        if self._waited_for is not None:
            self._waited_for.cancel()
        self.cluster.replays.close("the gateway stops")
        connection = self.cluster.connection
        if connection is not None:
            connection.attachment.close("the gateway stops")
            await asyncio.wait((connection.attachment.reader,), timeout=STOP_SECONDS)
        running = self._started()
        running.rest.should_exit = True
        await asyncio.wait((running.rest_task,), timeout=2 * STOP_SECONDS)
        await _end(self._tasks)
        running.listener.close()

    async def _supervise(self, supervisor: Supervisor) -> None:
        self._supervising |= {
            self._keep(supervisor.keep_connected(), "keep connected"),
            self._keep(supervisor.keep_draft_checked(), "keep draft checked"),
        }

    def _started(self) -> "_Running":
        if self._running is None:
            raise RuntimeError("the gateway has not been started")
        return self._running

    def _on_loop(self, work: Coroutine[Any, Any, Result]) -> Result:
        if self._is_stopped:
            work.close()
            raise CancelledError
        future = asyncio.run_coroutine_threadsafe(work, self._started().loop)
        self._waited_for = future
        return future.result()

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """A task that dies leaves a gateway that only looks alive: it fails instead."""
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("gateway: task %s died", task.get_name(), exc_info=error)
            point = self._lifecycle.current_point()
            self._lifecycle.fail(point, f"{task.get_name()}: {type(error).__name__}: {error}")


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        await asyncio.wait(ending, timeout=STOP_SECONDS)


class _Running:
    """What `start` made."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        rest: RestServer,
        rest_task: asyncio.Task[None],
        listener: socket.socket,
    ) -> None:
        self.loop = loop
        self.rest = rest
        self.rest_task = rest_task
        self.listener = listener
        self.rest_port: int = listener.getsockname()[1]
