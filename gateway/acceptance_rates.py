"""How far drafts get, learned from what steps report.

A position's rate is the share of rows that get past it, of those that came as far and were asked
for a token there. A draft that is late, short or missing counts like a wrong one: what matters is
what was asked for and what came of it.

Two windows: a long one to believe, and a short one that takes its place once the two differ by more
than chance, so that a drafter that turns bad is found out within some twenty steps.
"""

import math
from collections.abc import Sequence

# What is kept of the past in each step with drafts.
LONG = 0.995
SHORT = 0.93
# And in each step without: what was learned long ago is not held against a drafter for ever.
IDLE = 0.998
# The short window forgets sooner, down to what it has to hold: the first look at a drafter that was
# left long ago is to count.
SHORT_IDLE = 0.98
# Rows that what is believed beforehand counts for.
PRIOR_ROWS = 4.0
# Rows that the short window has to hold, and standard errors by which it has to differ.
FEWEST_ROWS = 12.0
LEAST_DIFFERENCE = 4.0


class _Window:
    """Discounted counts."""

    def __init__(self, max_draft_length: int, keeps: float) -> None:
        self._keeps = keeps
        self.reached = [0.0] * max_draft_length
        self.passed = [0.0] * max_draft_length
        self.rows = 0.0
        self.first = 0.0  # rows whose first token stood: comparable among drafts of any length

    def keep(self, share: float) -> None:
        self.reached = [count * share for count in self.reached]
        self.passed = [count * share for count in self.passed]
        self.rows *= share
        self.first *= share

    def observe(self, draft_length: int, accepted: Sequence[int]) -> None:
        self.keep(self._keeps)
        for count in accepted:
            for position in range(min(count + 1, draft_length)):
                self.reached[position] += 1.0
                self.passed[position] += position < count
            self.rows += 1.0
            self.first += count > 0

    def take(self, other: "_Window") -> None:
        self.reached, self.passed = list(other.reached), list(other.passed)
        self.rows, self.first = other.rows, other.first


class AcceptanceRates:
    """Rates by position of the draft. Owned by one thread."""

    def __init__(self, max_draft_length: int, prior_rate: float) -> None:
        self._prior = prior_rate
        self._longest = max_draft_length
        self._long = _Window(max_draft_length, LONG)
        self._short = _Window(max_draft_length, SHORT)

    def observe(self, draft_length: int, accepted: Sequence[int]) -> bool:
        """A step: the draft length that was asked for and the accepted tokens of each row. True
        where drafts have become another kind, better or worse.
        """
        if draft_length == 0:
            self._long.keep(IDLE)
            if self._short.rows > FEWEST_ROWS:
                self._short.keep(SHORT_IDLE)
            return False
        length = min(draft_length, self._longest)
        self._long.observe(length, accepted)
        self._short.observe(length, accepted)
        if not self._differs():
            return False
        self._long.take(self._short)
        return True

    def _differs(self) -> bool:
        long, short = self._long, self._short
        if short.rows < FEWEST_ROWS or long.rows < 2 * short.rows:
            return False
        before, now = long.first / long.rows, short.first / short.rows
        # Never quite certain, however it went so far.
        share = min(max(before, 0.02), 0.98)
        error = math.sqrt(share * (1 - share) / short.rows)
        return abs(now - before) > LEAST_DIFFERENCE * error

    def rates(self) -> list[float]:
        """By position; one that was hardly reached is believed to be like the one before it."""
        rates = []
        believed = self._prior
        for reached, passed in zip(self._long.reached, self._long.passed, strict=True):
            believed = (passed + PRIOR_ROWS * believed) / (reached + PRIOR_ROWS)
            rates.append(believed)
        return rates

    def expected_tokens(self) -> list[float]:
        """Tokens that a row emits in a step, in the mean, by draft length from 0 on."""
        expected = [1.0]
        survival = 1.0
        for rate in self.rates():
            survival *= rate
            expected.append(expected[-1] + survival)
        return expected
