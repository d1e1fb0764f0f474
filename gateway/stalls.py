"""Sequences at the target that do not get on. They are reported, not ended. Seconds, monotonic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gateway.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledSequence:
    """One that the target has, and for which it has done nothing for `seconds`."""

    request_id: str
    sequence_id: int
    # Before its first token from this target, or after it.
    stage: Literal["prefill", "decode"]
    seconds: float


class ProgressWatch:
    """When the target last did something for each sequence of one stream.

    Its own tokens are progress, and so is every step with prefill: it may be its own prompt, or its
    recomputation after a preemption. For one without tokens every step is: it may be queued there.
    """

    def __init__(self, limit_seconds: float) -> None:
        """`limit_seconds`: so long without progress is a stall; 0 = nothing is."""
        self._limit_seconds = limit_seconds
        self._admitted_at: dict[int, float] = {}
        self._token_at: dict[int, float] = {}
        self._stepped_at = 0.0
        self._prefilled_at = 0.0

    def admitted(self, sequence_id: int, now: float) -> None:
        """It was sent to the target."""
        self._admitted_at[sequence_id] = now

    def stepped(self, now: float, *, has_prefill: bool) -> None:
        """One engine step."""
        self._stepped_at = now
        if has_prefill:
            self._prefilled_at = now

    def emitted(self, sequence_id: int, now: float) -> None:
        """Tokens came for it."""
        self._token_at[sequence_id] = now

    def left(self, sequence_id: int) -> None:
        """It is not at the target any more."""
        self._admitted_at.pop(sequence_id, None)
        self._token_at.pop(sequence_id, None)

    def stalled(self, running: Mapping[int, Sequence], now: float) -> list[StalledSequence]:
        """Of those that are at the target, the ones without progress."""
        if not self._limit_seconds:
            return []
        found = []
        for sequence_id, sequence in running.items():
            token_at = self._token_at.get(sequence_id)
            if token_at is None:
                progress_at = max(self._admitted_at[sequence_id], self._stepped_at)
            else:
                progress_at = max(token_at, self._prefilled_at)
            if now - progress_at >= self._limit_seconds:
                found.append(
                    StalledSequence(
                        request_id=sequence.request.request_id,
                        sequence_id=sequence_id,
                        stage="prefill" if token_at is None else "decode",
                        seconds=round(now - progress_at, 3),
                    )
                )
        return found
