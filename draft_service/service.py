"""The draft service as `run_service` sees it."""

import asyncio
import gc
import logging
import threading
from collections.abc import Callable, Sequence

import grpc

from draft_service.boot import BootedDrafter
from draft_service.config import DraftConfig
from draft_service.counters import Counters
from draft_service.engine_thread import EngineLoop, Mailbox
from draft_service.links import LinkTable
from draft_service.proposer import Proposer
from draft_service.servicer import BootedDraft, DraftServicer
from outrider.engine.errors import EngineError
from outrider.serving.faults import FaultInjector, parse_faults
from outrider.serving.gpu_monitor import monitor_gpu
from outrider.serving.lifecycle import Lifecycle, Timeouts
from outrider.serving.network import tls_exposure
from outrider.serving.stages import ENGINE_STAGES, NGRAM_STAGES
from outrider.v1 import draft_pb2, draft_pb2_grpc, status_pb2

logger = logging.getLogger(__name__)

SERVICE = "draft"

# A target that was told to go away closes its stream at once. One that does not is not waited
# for any longer: it loses nothing but drafts.
GO_AWAY_SECONDS = 2.0


BootDrafter = Callable[[DraftConfig, Lifecycle[BootedDraft]], BootedDrafter]


def create_lifecycle(config: DraftConfig) -> Lifecycle[BootedDraft]:
    """The life of this process. Raises ConfigurationError for a fault that is not there."""
    faults = FaultInjector(SERVICE, parse_faults(SERVICE, config.inject_fault))
    faults.announce()
    return Lifecycle(
        service=SERVICE,
        stages=NGRAM_STAGES if config.draft == "ngram" else ENGINE_STAGES,
        configuration=config.shown(),
        faults=faults,
        timeouts=Timeouts(
            stage_seconds=config.startup_timeout, activity_seconds=config.step_timeout
        ),
        expected_errors=(EngineError,),
    )


class DraftService:
    """Wires the event loop's side and the engine thread's together."""

    def __init__(
        self,
        *,
        config: DraftConfig,
        lifecycle: Lifecycle[BootedDraft],
        boot_drafter: BootDrafter,
    ) -> None:
        self._config = config
        self._boot_drafter = boot_drafter
        self._lifecycle = lifecycle
        self.counters = Counters()
        self._mailbox = Mailbox()
        self._links = LinkTable()
        self._tasks: set[asyncio.Task[None]] = set()

    def register(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the Link servicer, which answers UNAVAILABLE until SERVING."""
        draft_pb2_grpc.add_DraftServiceServicer_to_server(  # type: ignore[no-untyped-call]
            DraftServicer(
                lifecycle=self._lifecycle,
                links=self._links,
                counters=self.counters,
                feature_transport=self._config.feature_transport,
            ),
            server,
        )
        return [draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name]

    def exposure(self) -> Sequence[str]:
        """What is asked of callers, in words."""
        return (tls_exposure(self._config.tls),)

    async def start(self) -> None:
        """Watches for the failure that ends all links."""
        self._tasks.add(asyncio.create_task(self._end_links_on_failure()))

    def boot(self) -> None:
        """Boots the drafter, then is the engine thread: nothing else ever touches the drafter."""
        booted = self._boot_drafter(self._config, self._lifecycle)
        self._describe(booted)
        proposer = Proposer(
            drafter=booted.drafter,
            draft_boot_id=self._lifecycle.boot_id,
            max_sequences=self._config.max_sequences,
            activity=self._lifecycle.activity,
            counters=self.counters,
        )
        # A collection that walks everything boot has made would take as long as some proposals.
        gc.collect()
        gc.freeze()
        self._lifecycle.serve(
            BootedDraft(
                offer=booted.drafter.offer,
                identity=booted.identity,
                mailbox=self._mailbox,
                first_draft=booted.first_draft,
            )
        )
        threading.current_thread().name = "engine"
        EngineLoop(proposer=proposer, mailbox=self._mailbox).run()

    async def drain(self, timeout_seconds: float) -> None:
        """Tells every target, and waits a little for them to leave."""
        self._links.go_away("the draft service is stopping")
        await self._links.wait_until_empty(min(timeout_seconds, GO_AWAY_SECONDS))

    async def stop(self) -> None:
        """Ends the streams and the engine thread."""
        self._links.end_all(f"{SERVICE}: {self._lifecycle.words()}")
        self._mailbox.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        logger.info("%s: counted: %s", SERVICE, self.counters.words() or "nothing unusual")

    def _describe(self, booted: BootedDrafter) -> None:
        offer = booted.drafter.offer
        monitor = None
        if booted.device != "cpu":
            # Not for an n-gram drafter, which goes without torch.
            from outrider.engine.devices import gpu_uuid

            monitor = monitor_gpu(gpu_uuid(booted.device))
        self._lifecycle.describe(
            gpu=None if monitor is None else monitor.figures,
            model_fingerprint=offer.fingerprint,
            device=booted.device,
            limits={
                "max_sequences": str(self._config.max_sequences),
                "max_draft_length": str(offer.max_draft_length),
                "max_sequence_length": str(offer.max_sequence_length),
                "first_draft": booted.first_draft.words(),
                **booted.limits,
            },
        )

    async def _end_links_on_failure(self) -> None:
        while True:
            revision = self._lifecycle.revision
            if self._lifecycle.state == status_pb2.SERVICE_STATE_FAILED:
                self._links.end_all(f"{SERVICE}: {self._lifecycle.words()}")
                return
            await self._lifecycle.changed_since(revision)
