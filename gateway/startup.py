"""The gateway's start-up once the tokenizer is there: stages connect, handshake and canary.

Belongs to the event loop.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from gateway.canary import LONG_TOKENS, SHORT_TOKENS, CanaryFailed, CanaryReport
from gateway.connection import Attachment, canary_of
from gateway.connector import Connector
from gateway.model import ModelMismatch, ServedModel
from outrider.serving.errors import NotServing

logger = logging.getLogger(__name__)

FIRST_RETRY_SECONDS = 0.5
LONGEST_RETRY_SECONDS = 10.0
TOUCH_PERIOD_SECONDS = 0.25
# A canary without an accepted token is tried so often before that counts.
ACCEPTANCE_ATTEMPTS = 3


class StartUp:
    """Three stages, each with the results of the one before as its arguments."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._cluster = connector.cluster
        self._config = connector.config
        self._text_model = connector.text_model

    async def wait_for_peers(self, note: Callable[[str], None], touch: Callable[[], None]) -> None:
        """Returns once every peer says SERVING; says all the while which does not, and why.

        Calls `touch` while all that is waited for are peers that go on with their start-up.
        """
        noted = ""
        while waited_for := [peer for peer in self._cluster.peers if not peer.is_serving]:
            words = "; ".join(peer.view.words() for peer in waited_for)
            if words != noted:
                note(words)
                noted = words
            await self._cluster.changes.until_within(
                lambda noted=noted: self._connector.missing_words() != noted,  # type: ignore[misc]
                TOUCH_PERIOD_SECONDS,
            )
            # A peer that answers and has not failed bounds its own stages; only one that cannot be
            # reached is the gateway's to give up.
            if all(peer.is_booting for peer in waited_for):
                touch()

    async def handshake(self, note: Callable[[str], None]) -> ServedModel:
        """The target's model fits, and its link to the draft is in use.

        Raises ModelMismatch and NotServing.
        """
        model = await self._connector.ask_model()
        link = self._cluster.link
        while link is not None and not link.is_closed_circuit:
            if link.is_refused:
                raise ModelMismatch(link.words)
            self._raise_if_peer_is_gone("handshake")
            note(link.words)
            await self._cluster.changes.until(
                lambda words=link.words: (  # type: ignore[misc]
                    self._cluster.link is None
                    or self._cluster.link.words != words
                    or self._cluster.link.is_closed_circuit
                    or not all(peer.is_serving for peer in self._cluster.peers)
                )
            )
            link = self._cluster.link
        return model

    async def first_canary(self, model: ServedModel, note: Callable[[str], None]) -> CanaryReport:
        """Connects and runs the canary until it is conclusive. Raises CanaryFailed, NotServing."""
        deadline = time.monotonic() + 0.9 * self._config.startup_timeout
        attachment = await self._connector.attach(model)
        has_passed = False
        try:
            report = await self._conclusive_canary(attachment, deadline, note)
            has_passed = True
        except CanaryFailed as error:
            raise type(error)(await self._connector.explained(error)) from error
        finally:
            if not has_passed:
                attachment.close("the canary did not pass")
        self._connector.connected(attachment, report)
        if report.draft_length:
            self._connector.draft_checked(report)
        return report

    async def _conclusive_canary(
        self, attachment: Attachment, deadline: float, note: Callable[[str], None]
    ) -> CanaryReport:
        """Runs until a draft token is accepted, or its absence can only be the drafter's own."""
        draft_length = self._connector.canary_draft_length(attachment.model)
        canary = canary_of(attachment, self._text_model)
        retry_seconds = FIRST_RETRY_SECONDS
        for attempt in itertools.count(1):
            report = await canary.run(
                draft_length=draft_length,
                max_tokens=SHORT_TOKENS if attempt == 1 else LONG_TOKENS,
                timeout_seconds=max(deadline - time.monotonic(), 1.0),
            )
            note(report.words())
            if report.accepted_tokens or not draft_length:
                return report
            self._raise_if_peer_is_gone("canary")
            obstacle = self._draft_obstacle()
            if attempt >= ACCEPTANCE_ATTEMPTS and not obstacle:
                self._acceptance_is_missing(report)
                return report
            words = f"no draft token accepted yet; {obstacle or report.words()}"
            if time.monotonic() + retry_seconds > deadline:
                raise CanaryFailed(words)
            note(words)
            if attempt > 1:
                await asyncio.sleep(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LONGEST_RETRY_SECONDS)
        raise AssertionError("the attempts are endless")

    def _draft_obstacle(self) -> str:
        """Why drafts may be missing that says nothing about their quality; empty if nothing."""
        draft, link = self._cluster.draft, self._cluster.link
        if draft is None or link is None:
            return ""
        if not draft.is_serving or draft.view.stage:
            return draft.view.words()
        return "" if link.is_closed_circuit else link.words

    def _raise_if_peer_is_gone(self, stage: str) -> None:
        missing = self._connector.missing_words()
        if missing:
            raise (CanaryFailed if stage == "canary" else NotServing)(missing)

    def _acceptance_is_missing(self, report: CanaryReport) -> None:
        words = f"no draft token was accepted; {report.words()}"
        if self._config.canary_acceptance == "require":
            raise CanaryFailed(f"{words} (--canary-acceptance warn goes on all the same)")
        logger.warning("gateway: canary: %s", words)
