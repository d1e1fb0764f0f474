"""One sequence between the target's stream and the client that reads it.

Steps wait here while the client is slow: at most max_tokens of them, so a slow reader costs little
and holds nobody up. It outlives the stream that it began on: what was emitted is kept, so that
another stream can go on behind it. Belongs to the event loop.
"""

import asyncio
import time
from dataclasses import replace
from typing import Protocol

from gateway.request import GenerationRequest
from gateway.step import SequenceStep
from outrider.serving.errors import ServiceError
from outrider.v1 import generation_pb2, target_pb2

# One that has lost so many targets may be what ended them.
SUSPECT_LOSSES = 2


class SequenceHolder(Protocol):
    """Who sees to a sequence now: the batcher of a stream, or those who wait for the next one."""

    def cancel(self, sequence: "Sequence") -> None:
        """Nobody reads the sequence any more. Harmless for one that has ended."""


class Sequence:
    """A request, what was emitted for it, and what of that nobody has taken yet."""

    def __init__(
        self,
        sequence_id: int,
        request: GenerationRequest,
        *,
        holder: SequenceHolder,
        is_measured: bool,
    ) -> None:
        # Unique within the stream that it is on.
        self.sequence_id = sequence_id
        self.request = request
        # Clients' latencies are measured, the gateway's own requests' are not.
        self.is_measured = is_measured
        self.submitted_at = time.monotonic()
        self.last_token_at: float | None = None
        self.is_ended = False
        # So many streams were lost while it ran on them.
        self.losses = 0
        self.output_token_ids: list[int] = []
        self._holder = holder
        self._steps: list[SequenceStep] = []
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_suspect(self) -> bool:
        """It may be the cause of its targets' ends."""
        return self.losses >= SUSPECT_LOSSES

    def held_by(self, holder: SequenceHolder, sequence_id: int) -> None:
        """Another holder sees to it from now on, under another id."""
        self._holder = holder
        self.sequence_id = sequence_id

    def cancel(self) -> None:
        """Nobody reads it any more. Harmless for one that has ended."""
        self._holder.cancel(self)

    def remaining_seconds(self, now: float) -> float | None:
        """Until its deadline, perhaps below 0; None without one."""
        if not self.request.deadline_seconds:
            return None
        return self.submitted_at + self.request.deadline_seconds - now

    def to_message(self, now: float) -> target_pb2.Admit:
        """Its admission to a target, behind what was emitted already."""
        remaining = self.remaining_seconds(now)
        return self.request.to_message(
            self.sequence_id,
            resumed_output_token_ids=self.output_token_ids,
            # 0 would be none. A sequence that is late is ended by whoever holds it, or there.
            deadline_seconds=0.0 if remaining is None else max(remaining, 1e-3),
        )

    def push(self, step: SequenceStep) -> None:
        """Adds a step; one with a finish reason is the last."""
        if self.losses and step.cached_prompt_length:
            # What a second target had in its cache is no news to the client.
            step = replace(step, cached_prompt_length=0)
        self._steps.append(step)
        self.output_token_ids.extend(step.token_ids)
        self.is_ended = self.is_ended or step.finish_reason != 0
        self._wake()

    def expire(self) -> None:
        """Its deadline has passed: ends it as a target would."""
        self.push(
            SequenceStep(
                token_ids=(),
                drafted_length=0,
                accepted_length=0,
                finish_reason=generation_pb2.FINISH_REASON_DEADLINE,
            )
        )

    def fail(self, error: ServiceError) -> None:
        """Ends the sequence with an error, behind the steps that came before."""
        if self.is_ended:
            return
        self.is_ended = True
        self._error = error
        self._wake()

    async def take(self) -> list[SequenceStep]:
        """Everything since the last call, at least one step. Raises the error it ended with."""
        while not self._steps:
            if self._error is not None:
                raise self._error
            assert not self.is_ended, "read behind the end"
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        steps, self._steps = self._steps, []
        return steps

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
