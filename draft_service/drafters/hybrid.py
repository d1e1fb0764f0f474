"""The hybrid drafter: of two drafters, for each row the one whose draft is worth more there.

The first is asked for every draft, so it should be cheap; the second only for the rows that it
shall draft. The usual pair is prompt lookup and a model. Where the first Continues, it guides the
second: position by position the draft gets the token of whichever has been right more often where
the two disagree so.
"""

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from draft_service.drafters.drafter import (
    NO_PROPOSAL,
    Drafter,
    DrafterOffer,
    FeatureNeeds,
    FeatureRows,
    Proposal,
    Wish,
)
from draft_service.drafters.hybrid_guide import DisputeTrial, GuideRule, RowGuide
from draft_service.drafters.hybrid_part import Part, Seat
from draft_service.drafters.hybrid_rule import Choice, HybridRule, Text, class_of
from draft_service.drafters.hybrid_trial import MISSING, Trial
from outrider.engine.sampling import Sampling

NAME = "hybrid"

# Half of it is far more than there ever is to do for a sequence.
MAX_BACKLOG = 2**40

First = TypeVar("First")
Second = TypeVar("Second")
Either = TypeVar("Either")


class Rules:
    """What is learned of requests of one kind."""

    __slots__ = ("guide", "row")

    def __init__(self) -> None:
        self.row = HybridRule()
        self.guide = GuideRule()


class HybridSequence(Generic[First, Second]):
    """One sequence: its places with both drafters, and the proposals not settled yet."""

    __slots__ = (
        "first",
        "next_commit",
        "rules",
        "second",
        "text",
        "token_ids",
        "trials",
        "tried_length",
    )

    def __init__(
        self, token_ids: "array[int]", first: Seat[First], second: Seat[Second], rules: Rules
    ) -> None:
        self.token_ids = token_ids
        self.rules = rules
        self.first = first
        self.second = second
        self.text = Text()
        self.trials: list[Trial | DisputeTrial] = []
        # Tokens there were when the latest of them were proposed.
        self.tried_length = 0
        # The most that one step commits, by the last wish.
        self.next_commit = 1

    def compare(self) -> None:
        """Compares what was proposed with what was committed since."""
        self.trials = [trial for trial in self.trials if not trial.compare(self.token_ids)]


class _Row(NamedTuple, Generic[First, Second]):
    """A wish, the first's answer to it, and what the rule makes of that."""

    state: HybridSequence[First, Second]
    first: Proposal
    evidence_class: int
    choice: Choice
    second_wish: Wish[Second] | None  # None where the second is not asked
    guide: RowGuide | None  # of the second


class HybridDrafter(Generic[First, Second]):
    """Any two drafters as one; both are kept ready, and either serves where the other cannot.

    `backlog` is what lies before both, and upon that, by how urgent it is: nothing; half of
    max_backlog where the next step could put either out of reach, from where on the service
    prepares; all of it where neither can propose. So one drafter serves while the other is being
    prepared, and rows that one serves never cost the other its turn.

    Greedy and sampled requests are learned of apart: a sampled text does not go on as it did
    before nearly as often.
    """

    max_backlog = MAX_BACKLOG

    def __init__(self, first: Drafter[First], second: Drafter[Second]) -> None:
        """Raises ValueError where both need features, and not the same."""
        self._first = Part(first)
        self._second = Part(second)
        self._rules_of_greedy = Rules()
        self._rules_of_sampled = Rules()
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint=second.offer.fingerprint,
            max_draft_length=max(first.offer.max_draft_length, second.offer.max_draft_length),
            # Where one ends the other goes on.
            max_sequence_length=max(
                first.offer.max_sequence_length, second.offer.max_sequence_length
            ),
            feature_needs=_needs_of(first.offer, second.offer),
        )

    def open(self, token_ids: "array[int]", sampling: Sampling) -> HybridSequence[First, Second]:
        """A place with each drafter that can hold so many tokens."""
        return HybridSequence(
            token_ids,
            self._first.open(token_ids, sampling),
            self._second.open(token_ids, sampling),
            self._rules_of_greedy if sampling.is_greedy else self._rules_of_sampled,
        )

    def add_features(self, state: HybridSequence[First, Second], features: FeatureRows) -> bool:
        """To whichever needs them; False where one that does misses earlier ones."""
        first_has_all = self._first.add_features(state.first, features)
        second_has_all = self._second.add_features(state.second, features)
        return first_has_all and second_has_all

    def reserve(self, state: HybridSequence[First, Second], length: int) -> bool:
        """False where neither has the memory; one that has none lets the sequence go for good."""
        first_serves = self._first.reserve(state.first, length)
        second_serves = self._second.reserve(state.second, length)
        return first_serves or second_serves

    def backlog(self, state: HybridSequence[First, Second]) -> int:
        """What both have before them, and how urgent it is; 0 where there is no work."""
        behind = self._first.backlog(state.first) + self._second.backlog(state.second)
        if not (self._first.can_propose(state.first) or self._second.can_propose(state.second)):
            return self.max_backlog + behind
        if self._first.is_due(state.first, state.next_commit) or self._second.is_due(
            state.second, state.next_commit
        ):
            return self.max_backlog // 2 + behind
        return behind

    def prepare(
        self, states: Sequence[HybridSequence[First, Second]], budget_seconds: float
    ) -> None:
        """A piece of work of one drafter: of the first where it cannot propose, so that drafts
        start early; then of the second, which costs more where it lags; then of what is left.
        """
        firsts = [state.first for state in states]
        waiting = [seat for seat in firsts if not self._first.can_propose(seat)]
        if not (
            self._first.prepare(waiting, budget_seconds)
            or self._second.prepare([state.second for state in states], budget_seconds)
        ):
            self._first.prepare(firsts, budget_seconds)

    def propose(self, wishes: Sequence[Wish[HybridSequence[First, Second]]]) -> list[Proposal]:
        """Each row's draft from whom the rule chooses, or from the other where that has none.

        Evidence is the accepted length that such drafts have, in hundredths of a token.
        """
        for wish in wishes:
            wish.state.compare()
            wish.state.next_commit = wish.draft_length + 1
        firsts = _ask(
            self._first,
            [
                self._first.wish(wish.state.first, wish.draft_length, wish.finish_by)
                for wish in wishes
            ],
        )
        rows = [self._row(wish, first) for wish, first in zip(wishes, firsts, strict=True)]
        seconds = _ask(self._second, [row.second_wish for row in rows])
        return [self._take(row, second) for row, second in zip(rows, seconds, strict=True)]

    def close(self, state: HybridSequence[First, Second]) -> None:
        """Frees both; what was committed last still counts."""
        state.compare()
        self._first.close(state.first)
        self._second.close(state.second)

    def words(self) -> str:
        """How many drafts came from each, and how many tokens of them were accepted."""
        return "; ".join(
            f"{part.offer.name}: {part.usage.drafts} drafts, "
            f"{part.usage.accepted_tokens} tokens accepted"
            for part in (self._first, self._second)
        )

    def _row(
        self, wish: Wish[HybridSequence[First, Second]], first: Proposal
    ) -> _Row[First, Second]:
        state = wish.state
        evidence_class = class_of(first.evidence)
        continue_from = self._first.continuation_of(state.first)
        guide = None if continue_from is None else RowGuide(continue_from, state.rules.guide)
        second_wish = self._second.wish(state.second, wish.draft_length, wish.finish_by, guide)
        choice = Choice.FIRST
        if second_wish is not None:
            choice = state.rules.row.choose(
                state.text,
                evidence_class,
                first_length=len(first.token_ids),
                draft_length=second_wish.draft_length,
            )
        return _Row(
            state=state,
            first=first,
            evidence_class=evidence_class,
            choice=choice,
            second_wish=None if choice is Choice.FIRST else second_wish,
            guide=guide,
        )

    def _take(self, row: _Row[First, Second], second: Proposal) -> Proposal:
        """The draft that is used; both proposals are remembered, to be compared with what comes."""
        state, first, wish = row.state, row.first, row.second_wish
        rule = state.rules.row
        first_length = rule.expected_of_first(row.evidence_class, len(first.token_ids))
        second_length = 0.0
        if wish is not None:
            second_length = rule.expected_of_second(row.evidence_class, wish.draft_length)
        uses_second = bool(second.token_ids) and (
            row.choice is Choice.SECOND or not first.token_ids
        )
        # Asked again without a commit in between, the same is proposed: it counts once.
        if len(state.token_ids) > state.tried_length:
            state.tried_length = len(state.token_ids)
            if first.token_ids:
                state.trials.append(
                    Trial(
                        first.token_ids,
                        start=state.tried_length,
                        expected_length=first_length,
                        count=partial(rule.count_first, row.evidence_class),
                        fit=state.text.first,
                        usage=None if uses_second else self._first.usage,
                    )
                )
            if second.token_ids and wish is not None:
                is_short = len(second.token_ids) < wish.draft_length
                state.trials.append(
                    Trial(
                        [*second.token_ids, *((MISSING,) if is_short else ())],
                        start=state.tried_length,
                        expected_length=second_length,
                        count=partial(rule.count_second, row.evidence_class),
                        fit=state.text.second,
                        usage=self._second.usage if uses_second else None,
                    )
                )
                state.trials.extend(_trials_of_disputes(row, second))
        if uses_second:
            return Proposal(second.token_ids, round(100 * second_length))
        return Proposal(first.token_ids, round(100 * first_length))


def _trials_of_disputes(row: _Row[First, Second], second: Proposal) -> list[DisputeTrial]:
    """None where the second had no guide or none was needed."""
    if row.guide is None or not row.guide.disputes:
        return []
    return [
        DisputeTrial(
            second.token_ids,
            row.guide.disputes,
            start=row.state.tried_length,
            rule=row.state.rules.guide,
        )
    ]


def _ask(part: Part[Either], wishes: Sequence[Wish[Either] | None]) -> list[Proposal]:
    """In one batch; NO_PROPOSAL where there is no wish."""
    asked = [wish for wish in wishes if wish is not None]
    answers = iter(part.drafter.propose(asked) if asked else ())
    return [NO_PROPOSAL if wish is None else next(answers) for wish in wishes]


def _needs_of(first: DrafterOffer, second: DrafterOffer) -> FeatureNeeds | None:
    if first.feature_needs is None or second.feature_needs is None:
        return first.feature_needs or second.feature_needs
    if first.feature_needs != second.feature_needs:
        raise ValueError(
            f"{first.name} needs {first.feature_needs}, {second.name} needs "
            f"{second.feature_needs}: must be the same"
        )
    return first.feature_needs
