"""Which of two drafters a row's draft is taken from, by how far their drafts have got so far.

Pure: it knows neither drafters nor tokens. Owned by the drafter's thread.
"""

from bisect import bisect_right
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

# Each counted position makes the ones counted before it weigh so much less: about the last 200
# of a kind count.
DISCOUNT = 0.995
# A prior weighs as much as so many positions that were counted before all others.
PRIOR_WEIGHT = 8.0
# Positions told apart; a later one is taken for the last of these.
MAX_POSITIONS = 16

# Of one sequence the last proposals count, about 20 of them, against a prior which says that the
# text is like all others and weighs as much as so many accepted tokens.
TEXT_DISCOUNT = 0.95
TEXT_PRIOR_WEIGHT = 8.0

# Least evidence of a class of the first drafter's proposals, of class 1 and on. Evidence 0 is
# class 0.
CLASS_BOUNDS = (1, 2, 3, 4, 6, 9, 16)

# The second is asked beside the first at a class's first, second, fourth ... time, and at every
# one of these.
LOOK_EVERY = 16


class Rates(NamedTuple):
    """How often a draft's first token is right, and each later one once all before it are."""

    first: float
    later: float

    def at(self, position: int) -> float:
        """The rate of a position, from 0."""
        return self.later if position else self.first


# What is believed before anything was seen, by class: prompt lookup in replayed answers of a small
# model, by match length.
FIRST_RATES = (
    Rates(0.52, 0.55),
    Rates(0.25, 0.63),
    Rates(0.55, 0.75),
    Rates(0.60, 0.80),
    Rates(0.65, 0.83),
    Rates(0.70, 0.87),
    Rates(0.77, 0.92),
    Rates(0.85, 0.96),
)
# A small trained head, with the same model.
SECOND_RATES = Rates(0.52, 0.55)


def class_of(evidence: int) -> int:
    """The class of a proposal of the first drafter."""
    return bisect_right(CLASS_BOUNDS, evidence)


class Acceptance:
    """How far drafts of one kind get: of each position, how often it was right once all before it
    were.

    The product of these rates estimates how many drafts reach a position (Kaplan, Meier 1958):
    drafts of any length count, and a draft of which only the beginning could be compared counts
    for that.
    """

    __slots__ = ("_accepted", "_prior", "_prior_weights", "_seen")

    def __init__(self, prior: Callable[[int], float]) -> None:
        """`prior`: the rate of a position that is believed before any was seen."""
        self._prior = prior
        self._prior_weights = [PRIOR_WEIGHT] * MAX_POSITIONS
        self._seen = [0.0] * MAX_POSITIONS
        self._accepted = [0.0] * MAX_POSITIONS

    def count(self, position: int, is_right: bool) -> None:
        """A draft reached this position, counted from 0, and was right there or not."""
        position = min(position, MAX_POSITIONS - 1)
        self._prior_weights[position] *= DISCOUNT
        self._seen[position] = self._seen[position] * DISCOUNT + 1.0
        self._accepted[position] = self._accepted[position] * DISCOUNT + is_right

    def rate(self, position: int) -> float:
        """How often a position is right once all before it are."""
        position = min(position, MAX_POSITIONS - 1)
        weight = self._prior_weights[position]
        return (self._accepted[position] + weight * self._prior(position)) / (
            self._seen[position] + weight
        )

    def expected_length(self, draft_length: int) -> float:
        """The mean accepted length of a draft of so many tokens."""
        reached, length = 1.0, 0.0
        for position in range(draft_length):
            reached *= self.rate(position)
            length += reached
        return length


class TextFit:
    """How one drafter does in one sequence, compared with what was expected of it there.

    The factor by which it does better is taken for drawn from Gamma(w, w), whose mean is 1, and
    accepted tokens for Poisson: its mean after both is (w + accepted) / (w + expected).
    """

    __slots__ = ("_accepted", "_expected")

    def __init__(self) -> None:
        self._accepted = 0.0
        self._expected = 0.0

    def count(self, expected_length: float, accepted_length: int) -> None:
        """One of its proposals, all of it compared."""
        self._accepted = self._accepted * TEXT_DISCOUNT + accepted_length
        self._expected = self._expected * TEXT_DISCOUNT + expected_length

    @property
    def factor(self) -> float:
        """Above 1 where it does better than elsewhere."""
        return (TEXT_PRIOR_WEIGHT + self._accepted) / (TEXT_PRIOR_WEIGHT + self._expected)


class Text:
    """What one sequence says about the two drafters."""

    __slots__ = ("first", "second")

    def __init__(self) -> None:
        self.first = TextFit()
        self.second = TextFit()


class Choice(Enum):
    """Who is asked, and whose draft is used."""

    FIRST = auto()
    # The second is asked too, only to see how far it gets: that costs its time, but no token.
    FIRST_AND_LOOK = auto()
    SECOND = auto()


class HybridRule:
    """What has been learned of a pair of drafters, in all sequences of this process."""

    def __init__(self) -> None:
        self._second_anywhere = Acceptance(SECOND_RATES.at)
        self._first = [Acceptance(rates.at) for rates in FIRST_RATES]
        self._second = [Acceptance(self._second_anywhere.rate) for _ in FIRST_RATES]
        self._uses_of_first = [0] * len(FIRST_RATES)

    def choose(
        self, text: Text, evidence_class: int, *, first_length: int, draft_length: int
    ) -> Choice:
        """For a row in which the first has so many tokens of this class, and the second would
        be asked for `draft_length`. The first where they are worth the same: it is the cheaper.
        """
        if not first_length:
            return Choice.SECOND
        first = min(
            text.first.factor * self.expected_of_first(evidence_class, first_length), first_length
        )
        second = min(
            text.second.factor * self.expected_of_second(evidence_class, draft_length),
            draft_length,
        )
        if second > first:
            return Choice.SECOND
        self._uses_of_first[evidence_class] += 1
        return (
            Choice.FIRST_AND_LOOK if _is_due(self._uses_of_first[evidence_class]) else Choice.FIRST
        )

    def expected_of_first(self, evidence_class: int, draft_length: int) -> float:
        """Mean accepted length of the first's proposals of this class and length, in any text."""
        return self._first[evidence_class].expected_length(draft_length)

    def expected_of_second(self, evidence_class: int, draft_length: int) -> float:
        """Of the second's, in rows in which the first has a proposal of this class."""
        return self._second[evidence_class].expected_length(draft_length)

    def count_first(self, evidence_class: int, position: int, is_right: bool) -> None:
        """A proposal of the first, used or not, was right up to this position, and is there too
        or is not.
        """
        self._first[evidence_class].count(position, is_right)

    def count_second(self, evidence_class: int, position: int, is_right: bool) -> None:
        """As `count_first`; the class is that of the first's proposal in the row."""
        self._second_anywhere.count(position, is_right)
        self._second[evidence_class].count(position, is_right)


def _is_due(uses: int) -> bool:
    return uses % LOOK_EVERY == 0 or (uses < LOOK_EVERY and uses & (uses - 1) == 0)
