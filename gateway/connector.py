"""The steps that start-up and supervision share: ask, attach, and say what is in the way.

Belongs to the event loop.
"""

import asyncio
import logging
from collections.abc import Callable

from gateway.canary import CanaryFailed, CanaryReport, CanaryUnanswered
from gateway.cluster import Cluster, DraftCheck
from gateway.config import GatewayConfig
from gateway.connection import Attachment, Connection, attach
from gateway.handshake import ask_model
from gateway.model import ServedModel, TextModel
from gateway.stats import Statistics

logger = logging.getLogger(__name__)

ASK_TIMEOUT_SECONDS = 10.0
# A peer that fails ends its streams a moment before or after it says so in its status.
EXPLANATION_SECONDS = 1.5


class Connector:
    """Connects to the target of a cluster, for one text model."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        cluster: Cluster,
        text_model: TextModel,
        statistics: Statistics,
        gateway_boot_id: int,
        on_task_end: Callable[[asyncio.Task[None]], None],
    ) -> None:
        self.config = config
        self.cluster = cluster
        self.text_model = text_model
        self._statistics = statistics
        self._gateway_boot_id = gateway_boot_id
        self._on_task_end = on_task_end

    async def ask_model(self) -> ServedModel:
        """The target's model. Raises NotServing and ModelMismatch."""
        return await ask_model(
            self.config.target_address,
            self.text_model,
            credentials=self.cluster.credentials,
            timeout_seconds=ASK_TIMEOUT_SECONDS,
        )

    async def attach(self, model: ServedModel) -> Attachment:
        """An open stream. Raises NotServing."""
        return await attach(
            self.config,
            model,
            gateway_boot_id=self._gateway_boot_id,
            statistics=self._statistics,
            replays=self.cluster.replays,
            credentials=self.cluster.credentials,
            on_end=self._stream_ended,
            timeout_seconds=ASK_TIMEOUT_SECONDS,
        )

    def connected(self, attachment: Attachment, report: CanaryReport) -> None:
        """The canary has passed: requests may go over the attachment."""
        self.cluster.connection = Connection(attachment=attachment, canary=report)
        logger.info("gateway: connected; canary: %s", report.words())
        attachment.batcher.resume(self.cluster.replays.release(attachment.model))
        self.cluster.changes.notify()

    def draft_checked(self, report: CanaryReport) -> None:
        """The canary with drafts has passed for the processes that are there now."""
        target_boot_id, draft_boot_id = self.boot_ids()
        self.cluster.draft_check = DraftCheck(
            target_boot_id=target_boot_id, draft_boot_id=draft_boot_id, report=report
        )
        self.cluster.changes.notify()

    def boot_ids(self) -> tuple[int, int]:
        """Of target and draft; 0 for one that was never seen."""
        draft = self.cluster.draft
        return self.cluster.target.boot_id, 0 if draft is None else draft.boot_id

    def canary_draft_length(self, model: ServedModel) -> int:
        """0 = there is nothing to draft with. Drafts are tried with --speculation off, too."""
        if self.cluster.draft is None:
            return 0
        return min(self.config.max_draft_length or model.max_draft_length, model.max_draft_length)

    def missing_words(self) -> str:
        """The peers that do not say SERVING, and why."""
        return "; ".join(peer.view.words() for peer in self.cluster.peers if not peer.is_serving)

    async def explained(self, error: CanaryFailed) -> str:
        """The error with what the peers say of themselves, which may come a moment later."""
        if not isinstance(error, CanaryUnanswered):
            return str(error)
        await self.cluster.changes.until_within(
            lambda: bool(self.missing_words()), EXPLANATION_SECONDS
        )
        missing = self.missing_words()
        return f"{error}; {missing}" if missing and missing not in str(error) else str(error)

    def _stream_ended(self, task: asyncio.Task[None]) -> None:
        self._on_task_end(task)
        self.cluster.changes.notify()
