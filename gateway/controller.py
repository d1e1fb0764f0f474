"""Chooses, for every number of decode rows, the draft length with the most tokens per second.

Pure: it is told what each step did and says which table holds. A draft length is worth the tokens
that a step then emits in the mean over the seconds that it takes, draft length 0 and the plain step
among the choices. What is not tried is tried now and then, briefly; what loses is left, and what
was left is looked at again.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.acceptance_rates import AcceptanceRates
from gateway.speculation import SpeculationPolicy, StepCost, rules_of, seconds_of
from gateway.step_times import StepTimes, row_bounds

# Believed before any draft was seen: what n-gram drafts reach on mixed prompts, which is less than
# a good model drafter does.
ASSUMED_ACCEPTANCE_RATE = 0.4

# A change has to promise so much more, and speculating anew a little more than that.
LEAST_GAIN = 0.01
LEAST_GAIN_FROM_ZERO = 0.015
# Steps in a bucket between two changes there.
DWELL_STEPS = 6
# Steps in a bucket between two looks at another draft length: longer after each that changed
# nothing, but not so that more than so many seconds pass.
FIRST_TRIAL_PERIOD = 48
LONGEST_TRIAL_PERIOD = 1024
# Where a look at drafts, none being made, raises what they promise by such a share, so many more
# follow as fast as they may.
SURPRISE = 0.05
HASTY_TRIALS = 4
# While something else seems worth this share of the best, looks stay this frequent.
CLOSE_SHARE = 0.93
LONGEST_PERIOD_IF_CLOSE = 64
LONGEST_TRIAL_SECONDS = 5.0
# A bucket begins by looking at every draft length so often that might be the best one there.
FEW_VISITS = 2
# While drafts seem worth little more than none, what none costs is looked at so often, every few
# steps: a drafter that has turned bad is left for it.
SURE_VISITS = 8
# Later what is worth less than this share of the best is not looked at while something else is.
HOPELESS_SHARE = 0.85
# Steps after which the buckets that are not in use are worked out anew.
REVIEW_PERIOD = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """What a step did. `accepted`: tokens of a draft that each decode row emitted."""

    decode_rows: int
    draft_length: int  # asked for
    seconds: float
    is_pure: bool  # without prefill
    accepted: Sequence[int]


@dataclass(slots=True)
class _Bucket:
    """One range of row counts."""

    draft_length: int
    steps: int = 0
    since_change: int = 0
    since_trial: int = 0
    trial: int | None = None  # draft length that is being looked at
    trial_period: int = FIRST_TRIAL_PERIOD
    hasty_trials: int = 0  # that are left
    tried_at: float = 0.0
    reason: str = "not in use yet: by what was measured at boot"

    @property
    def effective(self) -> int:
        """The draft length that the table has for it."""
        return self.draft_length if self.trial is None else self.trial


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketView:
    """A bucket for people: estimates by draft length from 0 on."""

    max_decode_rows: int
    draft_length: int
    looks_at: int | None
    reason: str
    steps: int
    step_seconds: tuple[float, ...]
    tokens_per_second: tuple[float, ...]


class Controller:
    """One target's. Owned by the event loop."""

    def __init__(
        self,
        *,
        step_costs: Sequence[StepCost],
        max_draft_length: int,
        max_running_sequences: int,
        max_decode_rows: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_costs`, at least one: seconds of a forward by rows, as measured at boot. Above
        `max_decode_rows` the target does not ask for drafts, whatever the table says.
        """
        costs = sorted(step_costs, key=lambda cost: cost.rows)
        self._longest = max_draft_length
        self._max_decode_rows = max_decode_rows
        self._clock = clock
        self._bounds = row_bounds(max_running_sequences)
        self._rates = AcceptanceRates(max_draft_length, ASSUMED_ACCEPTANCE_RATE)
        self._times = StepTimes(
            lambda rows, draft_length: seconds_of(costs, rows * (draft_length + 1)),
            self._bounds,
            max_draft_length,
        )
        self._steps = 0
        self._buckets = [_Bucket(self._best(index)) for index in range(len(self._bounds))]
        self._policy = self._made_policy()

    @property
    def policy(self) -> SpeculationPolicy:
        """The table that holds now."""
        return self._policy

    def observe(self, step: StepSeen) -> bool:
        """Learns from a step; True where the table is another one than before."""
        if step.decode_rows == 0 or step.draft_length > self._longest:
            return False
        if self._max_decode_rows is not None and step.decode_rows > self._max_decode_rows:
            # A bypass teaches nothing and is disturbed by nothing.
            return False
        index = self._times.bucket(step.decode_rows)
        is_look = step.draft_length > 0 and self._buckets[index].draft_length == 0
        promised = self._promised(index) if is_look else math.inf
        if self._rates.observe(step.draft_length, step.accepted):
            # Another drafter, as it were: what was looked at before says little.
            for bucket in self._buckets:
                bucket.trial_period = FIRST_TRIAL_PERIOD
        if step.is_pure:
            self._times.observe(step.decode_rows, step.draft_length, step.seconds)
        if is_look and self._promised(index) > promised * (1 + SURPRISE):
            self._buckets[index].hasty_trials = HASTY_TRIALS
        self._steps += 1
        self._turn(index)
        if self._steps % REVIEW_PERIOD == 0:
            self._review()
        rules = self._rules()
        if rules == self._policy.rules:
            return False
        self._policy = self._made_policy()
        return True

    def view(self) -> list[BucketView]:
        """Every bucket's estimates and why it has its draft length."""
        views = []
        for index, bucket in enumerate(self._buckets):
            seconds = [self._times.seconds(index, length) for length in range(self._longest + 1)]
            views.append(
                BucketView(
                    max_decode_rows=self._bounds[index],
                    draft_length=bucket.draft_length,
                    looks_at=bucket.trial,
                    reason=bucket.reason,
                    steps=bucket.steps,
                    step_seconds=tuple(seconds),
                    tokens_per_second=tuple(self._scores(index)),
                )
            )
        return views

    def rates(self) -> list[float]:
        """Learned acceptance by position of the draft."""
        return self._rates.rates()

    def _turn(self, index: int) -> None:
        """A step in a bucket: ends or begins a look at another draft length, or changes it.

        A look's table is taken back with the next report, wherever the target is by then: it holds
        for about a step there, and what comes of it is in a later report.
        """
        bucket = self._buckets[index]
        bucket.steps += 1
        bucket.since_change += 1
        bucket.since_trial += 1
        if bucket.trial is not None:
            bucket.trial = None
            bucket.tried_at = self._clock()
            if bucket.since_trial >= bucket.trial_period:
                bucket.trial_period = min(2 * bucket.trial_period, LONGEST_TRIAL_PERIOD)
            bucket.since_trial = 0
        if bucket.since_change < DWELL_STEPS or not self._change(index):
            bucket.trial = self._to_look_at(index)

    def _change(self, index: int) -> bool:
        bucket = self._buckets[index]
        scores = self._scores(index)
        best = max(range(len(scores)), key=lambda length: (scores[length], -length))
        now = bucket.draft_length
        gain = scores[best] / scores[now] - 1
        least = LEAST_GAIN if now else LEAST_GAIN_FROM_ZERO
        if best == now or gain < least:
            bucket.reason = (
                f"draft length {now}: {scores[now]:.1f} tokens/s expected, "
                f"the best other {self._best_other(scores, now)}"
            )
            return False
        bucket.reason = (
            f"draft length {best} since step {bucket.steps} here: {scores[best]:.1f} tokens/s "
            f"expected, {scores[now]:.1f} with {now}"
        )
        bucket.draft_length = best
        bucket.since_change = 0
        bucket.trial_period = FIRST_TRIAL_PERIOD
        return True

    def _to_look_at(self, index: int) -> int | None:
        """The draft length to look at now; None in most steps."""
        bucket, scores = self._buckets[index], self._scores(index)
        others = [length for length in range(self._longest + 1) if length != bucket.draft_length]
        if not others:
            return None

        def visits(length: int) -> int:
            return self._times.visits(index, length)

        best = max(scores)
        unknown = [
            length
            for length in others
            # Even if every draft were right, some cost more than they can bring.
            if visits(length) < FEW_VISITS and self._most(index, length) > best
        ]
        if unknown:
            return min(unknown, key=lambda length: (visits(length), length))
        is_doubtful = bucket.draft_length > 0 and scores[0] >= HOPELESS_SHARE * best
        if is_doubtful and visits(0) < SURE_VISITS and bucket.since_trial >= DWELL_STEPS:
            return 0
        if not self._is_look_due(index):
            return None
        worth = [length for length in others if scores[length] >= HOPELESS_SHARE * best]
        # Also what seems hopeless is looked at, the cheapest of it: acceptance may have risen.
        return min(worth or others[:1], key=visits)

    def _is_close(self, index: int) -> bool:
        scores = self._scores(index)
        others = [score for length, score in enumerate(scores)
                  if length != self._buckets[index].draft_length]  # fmt: skip
        return max(others, default=0.0) >= CLOSE_SHARE * max(scores)

    def _is_look_due(self, index: int) -> bool:
        bucket = self._buckets[index]
        period = bucket.trial_period
        if self._is_close(index):
            period = min(period, LONGEST_PERIOD_IF_CLOSE)
        if bucket.since_trial >= period:
            return True
        if bucket.hasty_trials and bucket.since_trial >= DWELL_STEPS:
            bucket.hasty_trials -= 1
            return True
        waited = self._clock() - bucket.tried_at
        return bucket.since_trial >= FIRST_TRIAL_PERIOD and waited >= LONGEST_TRIAL_SECONDS

    def _promised(self, index: int) -> float:
        """Tokens per second with the best drafts; 0 where none can be asked for."""
        return max(self._scores(index)[1:], default=0.0)

    def _most(self, index: int, length: int) -> float:
        """Tokens per second if every draft were right."""
        return self._times.rows(index) * (length + 1) / self._times.seconds(index, length)

    def _review(self) -> None:
        """Buckets that were never in use follow what was learned in the others."""
        for index, bucket in enumerate(self._buckets):
            if bucket.steps == 0:
                bucket.draft_length = self._best(index)

    def _best(self, index: int) -> int:
        scores = self._scores(index)
        return max(range(len(scores)), key=lambda length: (scores[length], -length))

    def _best_other(self, scores: Sequence[float], now: int) -> str:
        others = [length for length in range(len(scores)) if length != now]
        if not others:
            return "none"
        best = max(others, key=scores.__getitem__)
        return f"{best} with {scores[best]:.1f}"

    def _scores(self, index: int) -> list[float]:
        """Tokens per second by draft length from 0 on."""
        rows = self._times.rows(index)
        return [
            rows * expected / self._times.seconds(index, length)
            for length, expected in enumerate(self._rates.expected_tokens())
        ]

    def _rules(self) -> tuple[tuple[int, int], ...]:
        lengths = [bucket.effective for bucket in self._buckets]
        return rules_of(list(zip(self._bounds, lengths, strict=True)))

    def _made_policy(self) -> SpeculationPolicy:
        rates = ", ".join(f"{rate:.2f}" for rate in self._rates.rates())
        return SpeculationPolicy(
            rules=self._rules(),
            max_decode_rows=self._max_decode_rows,
            reasons=(
                "draft length with the most expected tokens per second, by decode rows, learned "
                f"from {self._steps} steps",
                f"acceptance by position of the draft: {rates}",
                *(
                    f"up to {self._bounds[index]} rows: {bucket.reason}"
                    for index, bucket in enumerate(self._buckets)
                    if bucket.steps
                ),
            ),
        )
