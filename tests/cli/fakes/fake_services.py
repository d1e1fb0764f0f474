"""Small services with the life cycle of the real ones, for tests of the supervisor.

`python -m fake_services SERVICE FLAGS...`; they fail, hang and exit where OUTRIDER_INJECT_FAULT
says.
"""

import http.server
import sys
import threading
import time
from collections.abc import Sequence

import grpc
from pydantic import Field

from outrider.cli.cluster import ServiceKind, ServiceKinds
from outrider.serving.config import ServiceConfig, parse_config
from outrider.serving.faults import FaultInjector, parse_faults
from outrider.serving.lifecycle import Lifecycle, Timeouts
from outrider.serving.probe import probe_grpc
from outrider.serving.server import configure_logging, run_service
from outrider.serving.stages import ENGINE_STAGES, GATEWAY_STAGES, NGRAM_STAGES

STAGES = {"target": ENGINE_STAGES, "draft": NGRAM_STAGES, "gateway": GATEWAY_STAGES}


class FakeTargetConfig(ServiceConfig):
    """A target."""

    port: int = Field(0, description="port")
    model: str = Field("fake", description="model")
    draft_address: str = Field("", description="draft")
    step_seconds: float = Field(0.1, description="seconds between steps")
    ignore_stop: bool = Field(False, description="a drain that takes for ever")


class FakeDraftConfig(ServiceConfig):
    """A draft."""

    port: int = Field(0, description="port")
    draft: str = Field("ngram", description="kind")
    draft_model: str = Field("", description="model")


class FakeGatewayConfig(ServiceConfig):
    """A gateway."""

    port: int = Field(0, description="port")
    rest_port: int = Field(0, description="REST port")
    target_address: str = Field("", description="target")
    draft_address: str = Field("", description="draft")
    model: str = Field("fake", description="model")


CONFIGS: dict[str, type[ServiceConfig]] = {
    "target": FakeTargetConfig,
    "draft": FakeDraftConfig,
    "gateway": FakeGatewayConfig,
}


def fake_kinds() -> ServiceKinds:
    """The fakes, for plan_cluster."""
    kinds = {
        service: ServiceKind(service=service, module=f"fake_{service}", config_class=config_class)
        for service, config_class in CONFIGS.items()
    }
    return ServiceKinds(target=kinds["target"], draft=kinds["draft"], gateway=kinds["gateway"])


class FakeService:
    """Boots through its stages; a target then steps, a gateway answers /readyz."""

    def __init__(self, lifecycle: Lifecycle[object], config: ServiceConfig) -> None:
        self._lifecycle = lifecycle
        self._config = config

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        return ()

    def exposure(self) -> Sequence[str]:
        return ()

    async def start(self) -> None:
        if isinstance(self._config, FakeGatewayConfig):
            server = http.server.ThreadingHTTPServer(
                (self._config.host, self._config.rest_port), _handler(self._is_ready)
            )
            threading.Thread(target=server.serve_forever, daemon=True).start()

    def boot(self) -> None:
        for stage in STAGES[self._lifecycle.service]:
            if stage == "graphs":
                self._lifecycle.skip(stage, "fake")
                continue
            self._lifecycle.enter(stage)
            if stage == "connect":
                self._wait_for_peers()
            time.sleep(0.02)
        self._lifecycle.serve(object())
        if isinstance(self._config, FakeTargetConfig):
            while True:
                time.sleep(self._config.step_seconds)
                with self._lifecycle.activity("step"):
                    pass

    async def drain(self, timeout_seconds: float) -> None:
        print(f"fake {self._lifecycle.service} drains", flush=True)
        if isinstance(self._config, FakeTargetConfig) and self._config.ignore_stop:
            time.sleep(3600)

    async def stop(self) -> None:
        pass

    def _peers(self) -> list[str]:
        assert isinstance(self._config, FakeGatewayConfig)
        addresses = (self._config.target_address, self._config.draft_address)
        return [address for address in addresses if address]

    def _wait_for_peers(self) -> None:
        while any(probe_grpc(peer) != "SERVING" for peer in self._peers()):
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        return self._lifecycle.is_serving and probe_grpc(self._peers()[0]) == "SERVING"


def _handler(is_ready):  # type: ignore[no-untyped-def]
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/readyz" and is_ready() else 503)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    return Handler


def main(service: str) -> None:
    config = parse_config(CONFIGS[service], service, sys.argv[1:])
    configure_logging(service, config.log_level)
    faults = FaultInjector(service, parse_faults(service, config.inject_fault))
    lifecycle: Lifecycle[object] = Lifecycle(
        service=service,
        stages=STAGES[service],
        configuration=config.shown(),
        faults=faults,
        timeouts=Timeouts(
            # A fake gateway waits for the others without being the first to give up.
            stage_seconds=config.startup_timeout * (20 if service == "gateway" else 1),
            activity_seconds=config.step_timeout,
        ),
    )
    port = config.model_dump()["port"]
    run_service(FakeService(lifecycle, config), lifecycle, config, port)
