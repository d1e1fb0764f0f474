"""Guides a drafter by another one's continuations: where the two disagree about a position of the
draft, the one that has been right more often in such disagreements gets it.

Pure: it knows neither drafters nor sequences. Owned by the drafter's thread.
"""

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draft_service.drafters.drafter import Proposal
from draft_service.drafters.hybrid_rule import DISCOUNT, PRIOR_WEIGHT, class_of

# Probabilities that the guided drafter gives its token are told apart in so many buckets.
NUM_BUCKETS = 20

# What is believed before anything was seen, by class of the first's evidence: how often prompt
# lookup is right where a small trained head says something else, by match length, in replayed
# answers of a small model. Without evidence there is nothing to disagree with.
FIRST_RATES = (0.0, 0.11, 0.27, 0.40, 0.47, 0.60, 0.62, 0.79)


class Rate:
    """How often something was right, of late."""

    __slots__ = ("_right", "_seen")

    def __init__(self, prior: float) -> None:
        """`prior`: what is believed before anything was seen."""
        self._seen = PRIOR_WEIGHT
        self._right = PRIOR_WEIGHT * prior

    def count(self, is_right: bool) -> None:
        """Once more, right or not."""
        self._seen = self._seen * DISCOUNT + 1.0
        self._right = self._right * DISCOUNT + is_right

    @property
    def value(self) -> float:
        """0 .. 1."""
        return self._right / self._seen


class Dispute(NamedTuple):
    """A position about which the two disagree."""

    offset: int  # in the draft
    first_token_id: int
    second_token_id: int
    evidence_class: int  # of the first's token
    bucket: int  # of the probability that the second gives its own


class GuideRule:
    """Who is right in a dispute, as learned in all sequences of one kind."""

    def __init__(self) -> None:
        self._first = [Rate(rate) for rate in FIRST_RATES]
        # Contradicted or not, it is believed to be right as often as it says.
        self._second = [Rate((bucket + 0.5) / NUM_BUCKETS) for bucket in range(NUM_BUCKETS)]

    def prefers_first(self, dispute: Dispute) -> bool:
        """The first's token goes into the draft; else the second's."""
        return self._first[dispute.evidence_class].value > self._second[dispute.bucket].value

    def count(self, dispute: Dispute, token_id: int) -> None:
        """The token that came there, where all of the draft before it was right."""
        self._first[dispute.evidence_class].count(token_id == dispute.first_token_id)
        self._second[dispute.bucket].count(token_id == dispute.second_token_id)


class RowGuide:
    """The Guide of one draft; keeps its disputes."""

    __slots__ = ("_continue_from", "_rule", "disputes")

    def __init__(self, continue_from: Callable[[Sequence[int]], Proposal], rule: GuideRule) -> None:
        """`continue_from`: the first's next token behind the committed and these drafted ones."""
        self._continue_from = continue_from
        self._rule = rule
        self.disputes: list[Dispute] = []

    def choose(
        self, draft_token_ids: Sequence[int], token_id: int, probability: Callable[[], float]
    ) -> int:
        """As a Guide's."""
        first = self._continue_from(draft_token_ids)
        if not first.token_ids or first.token_ids[0] == token_id:
            return token_id
        dispute = Dispute(
            offset=len(draft_token_ids),
            first_token_id=first.token_ids[0],
            second_token_id=token_id,
            evidence_class=class_of(first.evidence),
            bucket=min(int(NUM_BUCKETS * probability()), NUM_BUCKETS - 1),
        )
        self.disputes.append(dispute)
        return dispute.first_token_id if self._rule.prefers_first(dispute) else token_id


class DisputeTrial:
    """The disputes about one draft, while the sequence goes on. Each is settled once, when its
    token is there, and only where all of the draft before it was right.
    """

    __slots__ = ("_compared_length", "_disputes", "_next", "_rule", "_start", "_token_ids")

    def __init__(
        self, token_ids: Sequence[int], disputes: Sequence[Dispute], *, start: int, rule: GuideRule
    ) -> None:
        """`token_ids`: the draft; `start`: the position of its first token; `disputes` ascend."""
        self._token_ids = token_ids
        self._disputes = disputes
        self._start = start
        self._rule = rule
        self._compared_length = 0
        self._next = 0  # dispute to be settled

    def compare(self, committed: "array[int]") -> bool:
        """As far as the sequence goes; True once no more can be settled."""
        while self._next < len(self._disputes):
            dispute = self._disputes[self._next]
            while self._compared_length < dispute.offset:
                position = self._start + self._compared_length
                if position >= len(committed):
                    return False
                if committed[position] != self._token_ids[self._compared_length]:
                    return True
                self._compared_length += 1
            if self._start + dispute.offset >= len(committed):
                return False
            self._rule.count(dispute, committed[self._start + dispute.offset])
            self._next += 1
        return True
