"""A whole gateway with fake peers, in an event loop that runs in a thread of its own."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import httpx
from fake_peers import FakeModel, FakePeer, FakeStatus, FakeTarget

from gateway.boot import load_text_model
from gateway.config import GatewayConfig
from gateway.generator import Gateway
from gateway.model import TextModel
from gateway.service import GatewayService
from outrider.serving.access import OwnAccess
from outrider.serving.channel import SERVER_OPTIONS
from outrider.serving.faults import FaultInjector
from outrider.serving.lifecycle import Lifecycle, Timeouts
from outrider.serving.model_source import DEFAULT_MODEL
from outrider.serving.stages import GATEWAY_STAGES
from outrider.serving.tls import server_credentials
from outrider.v1 import status_pb2, target_pb2, target_pb2_grpc

CONTEXT = 512


class ClusterUnderTest:
    """Fakes and gateway. Methods are called from the test's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, text_model: TextModel) -> None:
        self.loop = loop
        self._text_model = text_model
        vocabulary = text_model.vocabulary
        self.model = FakeModel(
            info=target_pb2.ModelInfo(
                name=text_model.name,
                identity=target_pb2.ModelIdentity(
                    vocab_size=vocabulary.vocab_size,
                    tokenizer_sha256=vocabulary.sha256,
                    eos_token_ids=sorted(vocabulary.eos_token_ids),
                    max_sequence_length=CONTEXT,
                    fingerprint="0123456789abcdef",
                ),
                max_running_sequences=8,
                max_draft_length=5,
                step_costs=[
                    target_pb2.StepCost(rows=8, seconds=0.03),
                    target_pb2.StepCost(rows=64, seconds=0.12),
                ],
            ),
            vocabulary=vocabulary.encode(
                "The quick brown fox jumps over the lazy dog, and so on.",
                parse_special=False,
                add_bos=False,
            ),
        )
        self.target_status = self.call(self._status("target"))
        self.draft_status = self.call(self._status("draft"))
        self.target = FakePeer(
            status=self.target_status,
            add=lambda server: target_pb2_grpc.add_TargetServiceServicer_to_server(
                FakeTarget(self.model, self.target_status), server
            ),
        )
        self.draft = FakePeer(status=self.draft_status, add=lambda server: None)
        self.link(status_pb2.LINK_STATE_CLOSED_CIRCUIT)
        self.call(self.target.start())
        self.call(self.draft.start())

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def do(self, function: Callable[[], None]) -> None:
        """Runs a function on the event loop."""

        async def run() -> None:
            function()

        self.call(run())

    def link(self, state: int, reason: str = "") -> None:
        """Sets the target's link to the draft process that is there now."""

        def change(message: status_pb2.ServiceStatus) -> None:
            del message.links[:]
            message.links.add(
                address="draft:1",
                state=state,
                reason=reason,
                draft_boot_id=self.draft_status.message.boot_id,
            )

        self.do(lambda: self.target_status.set(change))

    def start_gateway(self, **options: object) -> None:
        arguments = {
            "port": 0,
            "rest_port": 0,
            "target_address": self.target.address,
            "draft_address": self.draft.address,
            "startup_timeout": 20.0,
            "peer_timeout": 1.0,
            **options,
        }
        self.config = GatewayConfig(**arguments)
        self.lifecycle: Lifecycle[Gateway] = Lifecycle(
            service="gateway",
            stages=GATEWAY_STAGES,
            configuration=self.config.shown(),
            faults=FaultInjector("gateway", ()),
            timeouts=Timeouts(stage_seconds=self.config.startup_timeout, activity_seconds=30.0),
        )
        self.service = GatewayService(
            self.config, self.lifecycle, load=lambda reference: self._text_model
        )
        self.call(self._start())
        self._boot = threading.Thread(
            target=self.lifecycle.guard, args=(self.service.boot,), daemon=True
        )
        self._boot.start()
        own = OwnAccess(tls=self.config.tls)
        self.url = f"{own.scheme}://127.0.0.1:{self.service.rest_port}"
        self.client = httpx.Client(
            base_url=self.url, timeout=30, trust_env=False, verify=own.http().verify
        )

    def wait_ready(self) -> None:
        self.until(lambda: self.readyz()[0] == 200)

    def readyz(self) -> tuple[int, dict]:
        response = self.client.get("/readyz")
        return response.status_code, response.json()

    def service_line(self, service: str) -> dict:
        return next(one for one in self.readyz()[1]["services"] if one["service"] == service)

    def until(self, condition: Callable[[], bool], seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.readyz()
            time.sleep(0.01)

    def stop(self) -> None:
        if hasattr(self, "service"):
            self.client.close()
            self.call(self.service.stop())
            self.call(self.server.stop(0))
        self.call(self.target.stop())
        self.call(self.draft.stop())
        if hasattr(self, "_boot"):
            self._boot.join(10)

    async def _status(self, service: str) -> FakeStatus:
        return FakeStatus(service)

    async def _start(self) -> None:
        self.server = grpc.aio.server(
            options=SERVER_OPTIONS, interceptors=self.service.interceptors
        )
        self.service.register(self.server)
        credentials = server_credentials(self.config.tls)
        self.grpc_port = (
            self.server.add_insecure_port("127.0.0.1:0")
            if credentials is None
            else self.server.add_secure_port("127.0.0.1:0", credentials)
        )
        await self.server.start()
        await self.service.start()


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """One loop in a thread for all tests: two at once disturb each other inside grpc.aio."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(_settle(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _settle() -> None:
    """Lets tasks that were cancelled end."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=2)


_TEXT_MODELS: list[TextModel] = []


def default_text_model() -> TextModel:
    """The default model's text side, loaded once."""
    if not _TEXT_MODELS:
        _TEXT_MODELS.append(load_text_model(DEFAULT_MODEL))
    return _TEXT_MODELS[0]


@contextmanager
def running_cluster(
    loop: asyncio.AbstractEventLoop, text_model: TextModel | None = None
) -> Iterator[ClusterUnderTest]:
    """Fakes that run; the gateway is started by the test."""
    cluster = ClusterUnderTest(loop, text_model or default_text_model())
    try:
        yield cluster
    finally:
        cluster.stop()
