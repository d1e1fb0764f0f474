"""After start-up: notices that a peer is lost or replaced, and connects and checks again.

Belongs to the event loop.
"""

import asyncio
import logging

from gateway.canary import LONG_TOKENS, SHORT_TOKENS, CanaryFailed, CanaryReport, TokensDiffer
from gateway.cluster import Problem
from gateway.connection import Attachment, Connection, canary_of
from gateway.connector import Connector
from gateway.model import ModelMismatch
from gateway.peer_view import NO_ANSWER
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
        """Handshake and canary with the target that is there now. Raises what they raise."""
        cluster = self._cluster
        cluster.connection_problem = Problem(stage="handshake", reason="in progress")
        model = await self._connector.ask_model()
        attachment = await self._connector.attach(model)
        cluster.connection_problem = Problem(stage="canary", reason="in progress")
        has_passed = False
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
            has_passed = True
        except CanaryFailed as error:
            raise type(error)(await self._connector.explained(error)) from error
        finally:
            if not has_passed:
                attachment.close("the canary did not pass")
        self._connector.connected(attachment, report)

    async def _check_draft(self, attachment: Attachment) -> bool:
        """The canary with drafts on a live system; has it passed?"""
        cluster = self._cluster
        boot_ids = self._connector.boot_ids()
        try:
            report = await self._live_canary(attachment)
        except TokensDiffer as error:
            logger.error("gateway: canary: drafts change tokens; speculation is off: %s", error)
            reason = f"the canary found that drafts change tokens: {error}"
            bound = attachment.speculation.max_decode_rows
            attachment.speculation.override(no_speculation(reason, bound))
            cluster.draft_check_problem = Problem(stage="canary", reason=str(error))
        except CanaryFailed as error:
            cluster.draft_check_problem = Problem(stage="canary", reason=str(error))
        else:
            attachment.speculation.end_override()
            is_same_pair = boot_ids == self._connector.boot_ids()
            is_enough = report.accepted_tokens or self._config.canary_acceptance == "warn"
            if is_same_pair and is_enough:
                logger.info("gateway: canary with drafts: %s", report.words())
                self._connector.draft_checked(report)
                return True
            cluster.draft_check_problem = Problem(
                stage="canary", reason=f"no draft token was accepted; {report.words()}"
            )
        cluster.changes.notify()
        return False

    async def _live_canary(self, attachment: Attachment) -> CanaryReport:
        """A short one, and a long one where drafts came and none of their tokens was accepted."""
        draft_length = self._connector.canary_draft_length(attachment.model)
        canary = canary_of(attachment, self._text_model)
        report = await canary.run(
            draft_length=draft_length,
            max_tokens=SHORT_TOKENS,
            timeout_seconds=LIVE_CANARY_SECONDS,
        )
        # No draft at all under a bound: the system is loaded beyond it, and a longer canary would
        # only add to that.
        is_bypassed = report.drafts == 0 and attachment.speculation.max_decode_rows is not None
        if report.accepted_tokens or is_bypassed:
            return report
        return await canary.run(
            draft_length=draft_length,
            max_tokens=LONG_TOKENS,
            timeout_seconds=LIVE_CANARY_SECONDS,
        )

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
        stream = connection.attachment.stream
        # A target that is too busy to answer, but goes on decoding, is not lost.
        is_heard = view.state == NO_ANSWER and stream.silent_seconds < self._config.peer_timeout
        if view.state not in ("SERVING", "DRAINING") and not is_heard:
            return view.words().removeprefix("target: ")
        if target.boot_id != stream.target_boot_id:
            return "another process has taken its place"
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
