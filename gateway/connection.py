"""A way to the target: its model, its open stream with a batcher, and the policy sent over it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from gateway.batcher import Batcher, BatcherLimits
from gateway.canary import Canary, CanaryReport
from gateway.config import GatewayConfig
from gateway.controller import Controller
from gateway.model import ServedModel, TextModel
from gateway.replay import ReplayQueue
from gateway.speculation import (
    SpeculationPolicy,
    StepCost,
    fixed_speculation,
    no_speculation,
    threshold_bound,
)
from gateway.speculation_in_force import SpeculationInForce
from gateway.stats import Statistics
from gateway.target_stream import TargetStream, open_stream

# Sequences at the target beyond those that it runs, so that a place that gets free is taken in the
# very next step.
LEAST_QUEUED_AT_TARGET = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """An open stream that has not answered a canary yet. Carries no client's request."""

    model: ServedModel
    stream: TargetStream
    batcher: Batcher
    speculation: SpeculationInForce
    reader: asyncio.Task[None]

    def close(self, reason: str) -> None:
        """Ends the stream; the next one goes on with the clients' sequences."""
        self.batcher.lost(reason)
        self.reader.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """An attachment whose canary has passed: requests may go over it."""

    attachment: Attachment
    canary: CanaryReport


async def attach(
    config: GatewayConfig,
    model: ServedModel,
    *,
    gateway_boot_id: int,
    statistics: Statistics,
    replays: ReplayQueue,
    credentials: grpc.ChannelCredentials | None,
    on_end: Callable[[asyncio.Task[None]], None],
    timeout_seconds: float,
) -> Attachment:
    """Opens a stream and sends the policy. `on_end` is called when it ends. Raises NotServing."""
    policy, controller = speculation_for(config, model)
    stream = await open_stream(
        config.target_address,
        credentials=credentials,
        gateway_boot_id=gateway_boot_id,
        policy=policy.to_message(),
        vocab_size=model.vocab_size,
        timeout_seconds=timeout_seconds,
    )
    running = max(model.max_running_sequences, 1)
    batcher = Batcher(
        stream=stream,
        limits=BatcherLimits(
            window_seconds=config.batch_window_ms / 1e3,
            max_waiting=config.max_waiting_requests,
            max_in_flight=running + max(LEAST_QUEUED_AT_TARGET, running // 4),
            queue_timeout_seconds=config.queue_timeout,
            stall_seconds=config.stall_timeout,
        ),
        statistics=statistics,
        replays=replays,
    )
    speculation = SpeculationInForce(policy, controller, stream.set_policy)
    reader = asyncio.create_task(stream.run(batcher, speculation.observe))
    reader.add_done_callback(on_end)
    return Attachment(
        model=model, stream=stream, batcher=batcher, speculation=speculation, reader=reader
    )


def speculation_for(
    config: GatewayConfig, model: ServedModel
) -> tuple[SpeculationPolicy, Controller | None]:
    """The policy that the configuration asks for with this target, and who makes the next ones."""
    bound = threshold_bound(config.speculative_disable_batch_threshold)
    longest = min(config.max_draft_length, model.max_draft_length)
    if not config.draft_address:
        reason = "there is no draft service (--draft-address is empty)"
        return no_speculation(reason, bound), None
    if config.speculation == "off":
        return no_speculation("--speculation is off", bound), None
    if config.speculation == "fixed" or not model.info.step_costs or not longest:
        return fixed_speculation(longest, bound), None
    controller = Controller(
        step_costs=[
            StepCost(rows=cost.rows, seconds=cost.seconds) for cost in model.info.step_costs
        ],
        max_draft_length=longest,
        max_running_sequences=max(model.max_running_sequences, 1),
        max_decode_rows=bound,
    )
    return controller.policy, controller


def canary_of(attachment: Attachment, text_model: TextModel) -> Canary:
    """The canary for an attachment."""
    bound = attachment.speculation.max_decode_rows
    return Canary(
        batcher=attachment.batcher,
        model=attachment.model,
        text_model=text_model,
        runs_together=bound is None or bound >= 2,
        allows_near_ties=attachment.model.info.rounding_depends_on_rows,
    )
