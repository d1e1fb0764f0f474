"""One sequence between the target's stream and the client that reads it.

Steps wait here while the client is slow: at most max_tokens of them, so a slow reader costs little
and holds nobody up. Belongs to the event loop.
"""

import asyncio
import time

from gateway.request import GenerationRequest
from gateway.step import SequenceStep
from outrider.serving.errors import ServiceError


class Sequence:
    """What the target said of one request and nobody has taken yet."""

    def __init__(self, sequence_id: int, request: GenerationRequest, *, is_measured: bool) -> None:
        self.sequence_id = sequence_id
        self.request = request
        # Clients' latencies are measured, the gateway's own requests' are not.
        self.is_measured = is_measured
        self.submitted_at = time.monotonic()
        self.last_token_at: float | None = None
        self.is_ended = False
        self._steps: list[SequenceStep] = []
        self._error: ServiceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, step: SequenceStep) -> None:
        """Adds a step; one with a finish reason is the last."""
        self._steps.append(step)
        self.is_ended = self.is_ended or step.finish_reason != 0
        self._wake()

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
