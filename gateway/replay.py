"""Sequences whose target is gone, until the next one goes on with them.

A target's tokens depend on the model, the text so far, the parameters and the seed alone, so the
next target of the same model continues a sequence with the tokens that the lost one would have
said. Belongs to the event loop.
"""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass

from gateway.model import ServedModel
from gateway.sequence import Sequence
from outrider.serving.errors import NotServing

logger = logging.getLogger(__name__)

GIVEN_UP_REASONS = ("attempts", "timeout", "model", "stopped")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayLimits:
    """How often a sequence may lose its target, and how long it waits for the next one."""

    max_replays: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Computation:
    """What tokens depend on besides a request: two targets in which it is equal say the same."""

    fingerprint: str
    dtype: str
    device: str

    @classmethod
    def of(cls, model: ServedModel) -> "Computation":
        """Of a target's model."""
        return cls(model.fingerprint, model.info.dtype, model.info.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    reason: str
    timer: asyncio.TimerHandle


class ReplayQueue:
    """Holds the sequences of lost streams, in the order in which they were submitted."""

    def __init__(self, limits: ReplayLimits) -> None:
        self.limits = limits
        # Sequences sent to another stream than the one that they were running on.
        self.replayed = 0
        self.given_up: Counter[str] = Counter(dict.fromkeys(GIVEN_UP_REASONS, 0))
        self._waiting: dict[Sequence, _Waiting] = {}
        # Of the stream that all of them come from.
        self._computation: Computation | None = None
        self._closed: str | None = None

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a target."""
        return len(self._waiting)

    def take(self, sequence: Sequence, reason: str, *, was_running: bool) -> None:
        """Takes a sequence that has lost its stream. One that was not running on it cannot have
        been the cause.
        """
        if sequence.is_ended:
            return
        sequence.losses += was_running
        if self._closed is not None:
            self._give_up(sequence, "stopped", self._closed)
        elif sequence.losses > self.limits.max_replays:
            words = reason
            if self.limits.max_replays:
                words = f"{reason}; given up after {self.limits.max_replays} replays"
            self._give_up(sequence, "attempts", f"target: {words}")
        else:
            now = time.monotonic()
            remaining = sequence.remaining_seconds(now)
            seconds = self.limits.timeout_seconds
            if remaining is not None:
                seconds = min(seconds, max(remaining, 0.0))
            timer = asyncio.get_running_loop().call_later(seconds, self._timed_out, sequence)
            self._waiting[sequence] = _Waiting(reason=reason, timer=timer)
            sequence.held_by(self, sequence.sequence_id)

    def release(self, model: ServedModel) -> list[Sequence]:
        """The sequences that go on at a target of this model, now the caller's, oldest first.

        If it computes otherwise than the target that they come from, all of them are given up.
        """
        before, self._computation = self._computation, Computation.of(model)
        sequences = sorted(self._waiting, key=lambda sequence: sequence.submitted_at)
        for sequence in sequences:
            self._waiting.pop(sequence).timer.cancel()
        if sequences and before != self._computation:
            for sequence in sequences:
                self._give_up(
                    sequence,
                    "model",
                    f"target: it came back as {self._computation}, and the answer was begun by "
                    f"{before}",
                )
            return []
        if sequences:
            logger.info("gateway: %d sequences go on at the target", len(sequences))
        self.replayed += sum(sequence.losses > 0 for sequence in sequences)
        return sequences

    def cancel(self, sequence: Sequence) -> None:
        """Nobody reads the sequence any more. Harmless for one that has ended."""
        if not sequence.is_ended:
            sequence.is_ended = True
            self._waiting.pop(sequence).timer.cancel()

    def close(self, reason: str) -> None:
        """No target will come: gives up those that wait, and whoever comes from now on."""
        self._closed = reason
        for sequence in list(self._waiting):
            self._waiting.pop(sequence).timer.cancel()
            self._give_up(sequence, "stopped", reason)

    def _timed_out(self, sequence: Sequence) -> None:
        reason = self._waiting.pop(sequence).reason
        remaining = sequence.remaining_seconds(time.monotonic())
        if remaining is not None and remaining <= 0:
            sequence.expire()
            return
        self._give_up(
            sequence,
            "timeout",
            f"target: {reason}; none came back within {self.limits.timeout_seconds:g} s",
        )

    def _give_up(self, sequence: Sequence, why: str, words: str) -> None:
        self.given_up[why] += 1
        sequence.fail(NotServing(words))
