"""What the gateway knows of its peers and of its way to them, and what follows for readiness.

Holds facts and answers questions; the supervisor makes the facts. Belongs to the event loop.
"""

from dataclasses import dataclass, replace
from typing import Any

import grpc

from gateway.canary import CanaryReport
from gateway.changes import Changes
from gateway.config import GatewayConfig
from gateway.connection import Connection
from gateway.handshake import LinkView, link_view
from gateway.peer import Peer
from gateway.peer_view import ServiceView, live_view
from gateway.replay import ReplayLimits, ReplayQueue
from gateway.speculation import SpeculationPolicy
from gateway.stalls import StalledSequence
from outrider.serving.errors import NotServing
from outrider.serving.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Why something is not as it should be; the stage is one of the gateway's."""

    stage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCheck:
    """The canary with drafts that passed for one pair of processes."""

    target_boot_id: int
    draft_boot_id: int
    report: CanaryReport


class Cluster:
    """The peers, the connection and the last canary with drafts."""

    def __init__(
        self,
        config: GatewayConfig,
        lifecycle: Lifecycle[Any],
        credentials: grpc.ChannelCredentials | None,
    ) -> None:
        # For every call to a peer; None = plain text.
        self.credentials = credentials
        self.changes = Changes()
        self.target = Peer(
            "target",
            config.target_address,
            credentials=credentials,
            timeout_seconds=config.peer_timeout,
            on_change=self.changes.notify,
        )
        self.draft = (
            Peer(
                "draft",
                config.draft_address,
                credentials=credentials,
                timeout_seconds=config.peer_timeout,
                on_change=self.changes.notify,
            )
            if config.draft_address
            else None
        )
        self.connection: Connection | None = None
        # Why there is no connection; said once one was lost.
        self.connection_problem = Problem(stage="connect", reason="not connected yet")
        self.draft_check: DraftCheck | None = None
        self.draft_check_problem = Problem(stage="canary", reason="not run yet")
        # The sequences of streams that were lost.
        self.replays = ReplayQueue(
            ReplayLimits(max_replays=config.max_replays, timeout_seconds=config.replay_timeout)
        )
        self._requires_draft = config.require_draft
        self._lifecycle = lifecycle

    @property
    def peers(self) -> list[Peer]:
        """Everyone that is watched."""
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def unfinished_count(self) -> int:
        """Requests that were accepted and are not answered yet, wherever they are."""
        count = self.replays.waiting_count
        if self.connection is not None:
            batcher = self.connection.attachment.batcher
            count += batcher.running_count + batcher.waiting_count
        return count

    def stalled(self) -> list[StalledSequence]:
        """Sequences at the target that do not get on."""
        connection = self.connection
        return [] if connection is None else connection.attachment.batcher.stalled()

    @property
    def policy(self) -> SpeculationPolicy | None:
        """The policy in force; None without a connection."""
        connection = self.connection
        return None if connection is None else connection.attachment.speculation.policy

    @property
    def link(self) -> LinkView | None:
        """The target's link to the draft service; None without a draft service."""
        return None if self.draft is None else link_view(self.target, self.draft)

    def usable_connection(self) -> Connection:
        """Where requests go. Raises NotServing with everything that is in the way."""
        # Every state but SERVING, start-up and draining included.
        self._lifecycle.ready()
        obstacle = self._obstacle()
        if obstacle:
            raise NotServing(obstacle)
        if self.connection is None:
            problem = self.connection_problem
            raise NotServing(f"gateway: in stage {problem.stage}: {problem.reason}")
        return self.connection

    @property
    def is_ready(self) -> bool:
        """Requests are taken."""
        return self._lifecycle.is_serving and self.is_usable

    @property
    def is_usable(self) -> bool:
        """There is a target to send requests to, and nothing in the way."""
        return self.connection is not None and not self._obstacle()

    @property
    def is_degraded(self) -> bool:
        """Requests are answered, but without drafts that were seen to work."""
        return self.draft_problem() is not None

    def draft_problem(self) -> Problem | None:
        """Why drafts cannot be counted on; None while they can, or where none are wanted."""
        if self.draft is None or self.link is None:
            return None
        for peer in (self.draft, self.target):
            if not peer.is_serving:
                return Problem(stage="connect", reason=peer.view.words())
        if not self.link.is_closed_circuit:
            return Problem(stage="handshake", reason=self.link.words)
        if not self.is_draft_checked:
            return self.draft_check_problem
        return None

    @property
    def is_draft_checked(self) -> bool:
        """A canary with drafts has passed for the two processes that are there now."""
        check = self.draft_check
        return (
            check is not None
            and self.draft is not None
            and check.target_boot_id == self.target.boot_id
            and check.draft_boot_id == self.draft.boot_id
        )

    def services(self) -> list[ServiceView]:
        """Every service's state, stage and reason, the gateway's first."""
        views = [self._own_view(), self.target.view]
        if self.draft is not None:
            view = self.draft.view
            problem = self.draft_problem()
            # What is the target's own trouble is said in the target's line.
            if view.is_serving and self.target.is_serving and problem is not None:
                view = replace(view, stage=problem.stage, reason=problem.reason)
            views.append(view)
        return views

    def _own_view(self) -> ServiceView:
        view = live_view("gateway", self._lifecycle.status())
        if view.is_serving and self.connection is None:
            problem = self._connection_problem_now()
            return replace(view, stage=problem.stage, reason=problem.reason)
        return view

    def _connection_problem_now(self) -> Problem:
        """What went wrong last is of no interest while there is no target to try again with."""
        if self.target.is_serving:
            return self.connection_problem
        return Problem(stage="connect", reason=self.target.view.words())

    def _obstacle(self) -> str:
        if not self.target.is_serving:
            return self.target.view.words()
        if self._requires_draft:
            problem = self.draft_problem()
            if problem is not None:
                return f"the draft service is required: {problem.reason}"
        return ""
