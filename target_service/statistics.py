"""Counters of the target since it started. Written by the engine's thread and the link, read by
anyone.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from outrider.v1 import target_pb2
from target_service.codec import DROP_REASONS, RECEIVED_KINDS, SENT_KINDS
from target_service.link_features import TRANSPORTS
from target_service.policy import BYPASS_REASONS

STEP_BOUNDS_SECONDS = tuple(
    bound * 10.0**exponent for exponent in range(-4, 1) for bound in (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
)

# Observations that the quantiles are of.
NUM_LATEST = 64


class Durations:
    """A histogram of seconds, and the latest of them for quantiles."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_BOUNDS_SECONDS) + 1)
        self._sum = 0.0
        self._latest: deque[float] = deque(maxlen=NUM_LATEST)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_BOUNDS_SECONDS, seconds)] += 1
        self._sum += seconds
        self._latest.append(seconds)

    def quantile(self, share: float, latest: int = NUM_LATEST) -> float:
        """Quantile of the latest observations, in seconds; 0 before the first."""
        first = max(len(self._latest) - latest, 0)
        latest_seconds = sorted(islice(self._latest, first, None))
        if not latest_seconds:
            return 0.0
        return latest_seconds[min(len(latest_seconds) - 1, int(share * len(latest_seconds)))]

    def to_message(self) -> target_pb2.Histogram:
        return target_pb2.Histogram(
            upper_bounds=STEP_BOUNDS_SECONDS, counts=self._counts, sum=self._sum
        )


class Statistics:
    """What TargetStatistics says, and nothing else."""

    def __init__(self, max_draft_length: int) -> None:
        self.drafts = 0
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.accepted_per_position = [0] * max_draft_length
        self.speculative_steps = 0
        self.plain_steps = 0
        self.emitted_tokens = 0
        # Of sequences that have emitted a token.
        self.prompt_tokens = self.cached_prompt_tokens = 0
        # Every label is there from the start: a counter that appears with its first event has no
        # rate.
        self.bypass_steps = Counter(dict.fromkeys(BYPASS_REASONS, 0))
        self.link_messages = Counter(
            {
                **{("sent", kind): 0 for kind in SENT_KINDS},
                **{("received", kind): 0 for kind in RECEIVED_KINDS.values()},
            }
        )
        self.draft_rows_dropped = Counter(dict.fromkeys(DROP_REASONS, 0))
        self.feature_rows = Counter(dict.fromkeys(TRANSPORTS, 0))
        self.feature_bytes = Counter(dict.fromkeys(TRANSPORTS, 0))
        self.step_message_bytes = 0
        # Of speculative steps: waiting, the forward, and what the draft service said it took.
        self.draft_wait_seconds = self.forward_seconds = self.draft_build_seconds = 0.0
        self.link_round_trip = Durations()
        self.plain_step = Durations()
        self.speculative_step = Durations()

    def count_verdict(self, drafted_length: int, accepted_length: int) -> None:
        """One verified draft. `accepted_length` excludes the bonus token."""
        self.drafts += 1
        self.draft_tokens += drafted_length
        self.accepted_tokens += accepted_length
        for position in range(accepted_length):
            self.accepted_per_position[position] += 1

    def count_features(self, *, transport: str, rows: int, size: int) -> None:
        """Feature rows of one message, with the bytes that they have."""
        self.feature_rows[transport] += rows
        self.feature_bytes[transport] += size

    def count_step(
        self,
        *,
        is_speculative: bool,
        seconds: float,
        forward_seconds: float,
        draft_wait_seconds: float,
    ) -> None:
        """One step of the engine."""
        if is_speculative:
            self.speculative_steps += 1
            self.forward_seconds += forward_seconds
            self.draft_wait_seconds += draft_wait_seconds
            self.speculative_step.observe(seconds)
        else:
            self.plain_steps += 1
            self.plain_step.observe(seconds)

    def to_message(
        self,
        *,
        running_sequences: int,
        waiting_sequences: int,
        kv_blocks_free: int,
        kv_blocks_used: int,
        kv_blocks_cached: int,
        preemptions: int,
    ) -> target_pb2.TargetStatistics:
        """All counters, with the levels that the scheduler knows."""
        return target_pb2.TargetStatistics(
            drafts=self.drafts,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            accepted_tokens_per_position=self.accepted_per_position,
            speculative_steps=self.speculative_steps,
            plain_steps=self.plain_steps,
            bypass_steps=_labelled(self.bypass_steps.copy().items()),
            link_messages=[
                target_pb2.LinkMessageCount(direction=direction, kind=kind, count=count)
                for (direction, kind), count in self.link_messages.copy().items()
            ],
            draft_rows_dropped=_labelled(self.draft_rows_dropped.copy().items()),
            running_sequences=running_sequences,
            waiting_sequences=waiting_sequences,
            kv_blocks_free=kv_blocks_free,
            kv_blocks_used=kv_blocks_used,
            kv_blocks_cached=kv_blocks_cached,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            link_round_trip_seconds=self.link_round_trip.to_message(),
            plain_step_seconds=self.plain_step.to_message(),
            speculative_step_seconds=self.speculative_step.to_message(),
            preemptions=preemptions,
            emitted_tokens=self.emitted_tokens,
            feature_rows=_labelled(self.feature_rows.copy().items()),
            feature_bytes=_labelled(self.feature_bytes.copy().items()),
            step_message_bytes=self.step_message_bytes,
            speculative_seconds=[
                target_pb2.LabelledSeconds(label=label, seconds=seconds)
                for label, seconds in (
                    ("draft_wait", self.draft_wait_seconds),
                    ("forward", self.forward_seconds),
                    ("draft_build", self.draft_build_seconds),
                )
            ],
        )


def _labelled(items: Iterable[tuple[str, int]]) -> list[target_pb2.LabelledCount]:
    return [target_pb2.LabelledCount(label=label, count=count) for label, count in items]
