"""After start-up: notices that a peer is lost or replaced, and connects and checks again.

Belongs to the event loop.
"""

import asyncio
import logging

from gateway.canary import LONG_TOKENS, SHORT_TOKENS, CanaryFailed, TokensDiffer
from gateway.cluster import Problem
from gateway.connection import Attachment, Connection, canary_of
from gateway.connector import Connector
from gateway.model import ModelMismatch
from gateway.speculation import no_speculation
from outrider.serving.errors import NotServing

logger = logging.getLogger(__name__)

# A live canary is bounded by this, under whatever load.
LIVE_CANARY_SECONDS = 30.0
# How long a restarted target may take to link up with the draft before it is used without.
LIVE_LINK_SECONDS = 10.0
FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0


class Supervisor:
    """Two procedures that run as long as the gateway does."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._cluster = connector.cluster
        self._config = connector.config
        self._text_model = connector.text_model

    async def keep_connected(self) -> None:
        """Runs until cancelled: notices that the target is lost, and connects to its successor."""
        cluster = self._cluster
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            connection = cluster.connection
            if connection is not None:
                await cluster.changes.until(
                    lambda connection=connection: bool(self._loss(connection))  # type: ignore[misc]
                )
                self._disconnect(connection, self._loss(connection))
            await cluster.changes.until(lambda: cluster.target.is_serving)
            try:
                await self._reconnect()
                retry_seconds = FIRST_RETRY_SECONDS
            except (NotServing, ModelMismatch, CanaryFailed) as error:
                stage = "canary" if isinstance(error, CanaryFailed) else "handshake"
                cluster.connection_problem = Problem(stage=stage, reason=str(error))
                logger.warning("gateway: not connected: %s: %s", stage, error)
                cluster.changes.notify()
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)

    async def keep_draft_checked(self) -> None:
        """Runs until cancelled: the canary with drafts for every new pair of processes."""
        cluster = self._cluster
        retry_seconds = FIRST_RETRY_SECONDS
        while True:
            await cluster.changes.until(self._needs_draft_check)
            connection = cluster.connection
            assert connection is not None
            if await self._check_draft(connection.attachment):
                retry_seconds = FIRST_RETRY_SECONDS
            else:
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)

    async def _reconnect(self) -> None:
        cluster = self._cluster
        cluster.connection_problem = Problem(stage="handshake", reason="in progress")
        model = await self._connector.ask_model()
        attachment = await self._connector.attach(model)
        cluster.connection_problem = Problem(stage="canary", reason="in progress")
        try:
            report = await canary_of(attachment, self._text_model).run(
                draft_length=0, max_tokens=SHORT_TOKENS, timeout_seconds=LIVE_CANARY_SECONDS
            )
            draft = cluster.draft
            draft_length = self._connector.canary_draft_length(model)
            if draft_length and draft is not None and draft.is_serving:
                link_is_up = await cluster.changes.until_within(
                    lambda: cluster.link is not None and cluster.link.is_closed_circuit,
                    LIVE_LINK_SECONDS,
                )
                if link_is_up:
                    await self._check_draft(attachment)
        except CanaryFailed as error:
            attachment.close("the canary failed")
            raise type(error)(await self._connector.explained(error)) from error
        except asyncio.CancelledError:
            attachment.close("the gateway stops")
            raise
        self._connector.connected(attachment, report)

    async def _check_draft(self, attachment: Attachment) -> bool:
        """The canary with drafts on a live system; has it passed?"""
        cluster = self._cluster
        draft_length = self._connector.canary_draft_length(attachment.model)
        boot_ids = self._connector.boot_ids()
        try:
            report = await canary_of(attachment, self._text_model).run(
                draft_length=draft_length,
                max_tokens=LONG_TOKENS,
                timeout_seconds=LIVE_CANARY_SECONDS,
            )
        except TokensDiffer as error:
            logger.error("gateway: canary: drafts change tokens; speculation is off: %s", error)
            cluster.policy_override = no_speculation(
                f"the canary found that drafts change tokens: {error}",
                attachment.policy.max_decode_rows,
            )
            attachment.stream.set_policy(cluster.policy_override.to_message())
            cluster.draft_check_problem = Problem(stage="canary", reason=str(error))
        except CanaryFailed as error:
            cluster.draft_check_problem = Problem(stage="canary", reason=str(error))
        else:
            if cluster.policy_override is not None:
                cluster.policy_override = None
                attachment.stream.set_policy(attachment.policy.to_message())
            if boot_ids == self._connector.boot_ids():
                if report.accepted_tokens or self._config.canary_acceptance == "warn":
                    self._connector.draft_checked(report)
                    return True
                cluster.draft_check_problem = Problem(
                    stage="canary", reason=f"no draft token was accepted; {report.words()}"
                )
        cluster.changes.notify()
        return False

    def _disconnect(self, connection: Connection, reason: str) -> None:
        logger.warning("gateway: the target is lost: %s", reason)
        self._cluster.connection = None
        self._cluster.connection_problem = Problem(stage="connect", reason=reason)
        connection.attachment.close(reason)
        self._cluster.changes.notify()

    def _loss(self, connection: Connection) -> str:
        """Why a connection is of no use any more; empty while it is. Draining is still of use."""
        target = self._cluster.target
        view = target.view
        if view.state not in ("SERVING", "DRAINING"):
            return view.words()
        if target.boot_id != connection.attachment.stream.target_boot_id:
            return "target: another process has taken its place"
        return connection.attachment.batcher.lost_reason or ""

    def _needs_draft_check(self) -> bool:
        cluster = self._cluster
        link = cluster.link
        return (
            cluster.connection is not None
            and cluster.target.is_serving
            and cluster.draft is not None
            and cluster.draft.is_serving
            and link is not None
            and link.is_closed_circuit
            and not cluster.is_draft_checked
            and self._connector.canary_draft_length(cluster.connection.attachment.model) > 0
        )
