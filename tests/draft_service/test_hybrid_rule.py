"""The rule by simulation: texts in which both drafters' acceptance is known."""

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

from draft_service.drafters.hybrid_rule import (
    FIRST_RATES,
    LOOK_EVERY,
    Acceptance,
    Choice,
    HybridRule,
    Rates,
    Text,
    TextFit,
    class_of,
)

DRAFT_LENGTH = 5
CLASSES = range(8)
CLASS_FREQUENCIES = (10, 25, 20, 15, 10, 8, 6, 6)
# Twice the shortest match of each class, as prompt lookup has it.
FIRST_LENGTHS = (0, 2, 4, 5, 5, 5, 5, 5)

# Acceptance of both drafters by class.
Pair = tuple[Sequence[Rates], Sequence[Rates]]

PLAIN_HEAD = [Rates(0.52, 0.55)] * 8
# Easy where the text repeats itself.
HEAD = [Rates(0.45 + 0.05 * each, 0.50 + 0.05 * each) for each in CLASSES]
# People chat: a repetition means little. They translate or extract: it means more than usual.
CHAT = [Rates(0.55 * first, 0.55 * later) for first, later in FIRST_RATES]
COPY = [Rates((1 + first) / 2, (1 + later) / 2) for first, later in FIRST_RATES]
# Long matches mislead, short ones do not.
INVERTED = [Rates(0.5, 0.5), *reversed(FIRST_RATES[1:])]


class Totals:
    """Accepted tokens of the drafts used, and of either drafter's alone."""

    def __init__(self) -> None:
        self.rows = self.used = self.first = self.second = 0


def accepted_length(rng: random.Random, rates: Rates, draft_length: int) -> int:
    length = 0
    while length < draft_length and rng.random() < rates.at(length):
        length += 1
    return length


def simulate(
    rule: HybridRule, pairs: Sequence[Pair], *, sequences: int, seed: int = 0, learns_texts=True
) -> dict[tuple[int, int], Totals]:
    """Totals by (pair, class). Every sequence is of one of the pairs and has 60 steps."""
    rng = random.Random(seed)
    totals: dict[tuple[int, int], Totals] = defaultdict(Totals)
    for _ in range(sequences):
        text = Text()
        pair = rng.randrange(len(pairs))
        for kind in rng.choices(CLASSES, CLASS_FREQUENCIES, k=60):
            text = text if learns_texts else Text()
            length = FIRST_LENGTHS[kind]
            first = accepted_length(rng, pairs[pair][0][kind], length)
            second = accepted_length(rng, pairs[pair][1][kind], DRAFT_LENGTH)
            choice = rule.choose(text, kind, first_length=length, draft_length=DRAFT_LENGTH)
            if length:
                text.first.count(rule.expected_of_first(kind, length), first)
                for position in range(min(first + 1, length)):
                    rule.count_first(kind, position, position < first)
            if choice is not Choice.FIRST:
                text.second.count(rule.expected_of_second(kind, DRAFT_LENGTH), second)
                for position in range(min(second + 1, DRAFT_LENGTH)):
                    rule.count_second(kind, position, position < second)
            total = totals[pair, kind]
            total.rows += 1
            total.used += second if choice is Choice.SECOND else first
            total.first += first
            total.second += second
    return totals


def share_of_best(totals: dict[tuple[int, int], Totals]) -> float:
    """Accepted tokens, relative to the better drafter of each class in each kind of text."""
    best = sum(max(total.first, total.second) for total in totals.values())
    return sum(total.used for total in totals.values()) / best


def test_evidence_is_told_apart_in_eight_classes() -> None:
    bounds = {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 4, 6: 5, 8: 5, 9: 6, 15: 6, 16: 7, 99: 7}
    assert {evidence: class_of(evidence) for evidence in bounds} == bounds
    assert len(FIRST_RATES) == len(CLASSES)


@pytest.mark.parametrize("draft_length", [3, 5, 7])
def test_before_anything_was_seen_a_match_of_two_tokens_is_trusted_and_one_is_not(
    draft_length: int,
) -> None:
    rule = HybridRule()
    chosen = [
        rule.choose(
            Text(),
            class_of(match_length),
            first_length=min(2 * match_length, draft_length),
            draft_length=draft_length,
        )
        for match_length in range(17)
    ]
    assert chosen[:2] == [Choice.SECOND, Choice.SECOND]
    assert Choice.SECOND not in chosen[2:]


def test_a_known_rate_gives_the_expected_accepted_length() -> None:
    acceptance = Acceptance(Rates(0.5, 0.8).at)
    assert acceptance.expected_length(0) == 0
    assert acceptance.expected_length(3) == pytest.approx(0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.8)


def test_drafts_of_any_length_and_cut_ones_give_the_same_estimate() -> None:
    rng = random.Random(3)
    rates = Rates(0.7, 0.8)
    acceptance = Acceptance(Rates(0.2, 0.2).at)
    estimates = []
    for number in range(6000):
        length = rng.choice((1, 2, 4, 8))
        accepted = accepted_length(rng, rates, length)
        # A sequence may end before all is compared: a third of them do.
        compared = rng.randrange(9) if rng.random() < 0.3 else 9
        for position in range(min(accepted + 1, length, compared)):
            acceptance.count(position, position < accepted)
        if number >= 500:
            estimates.append(acceptance.expected_length(8))
    expected = sum(0.7 * 0.8**position for position in range(8))
    assert sum(estimates) / len(estimates) == pytest.approx(expected, rel=0.04)


def test_positions_that_were_never_reached_keep_their_prior() -> None:
    acceptance = Acceptance(Rates(0.5, 0.6).at)
    for _ in range(1000):
        acceptance.count(0, True)
    assert acceptance.rate(0) > 0.97
    assert acceptance.rate(1) == acceptance.rate(40) == pytest.approx(0.6)


def test_what_lies_back_is_forgotten() -> None:
    acceptance = Acceptance(Rates(0.5, 0.5).at)
    for is_right in (True, False):
        for _ in range(800):
            acceptance.count(0, is_right)
        assert acceptance.rate(0) == pytest.approx(float(is_right), abs=0.03)


def test_a_text_counts_by_what_was_expected_of_the_drafter_in_it() -> None:
    fit = TextFit()
    assert fit.factor == 1
    fit.count(2.0, 2)
    assert fit.factor == pytest.approx(1)
    fit.count(1.0, 3)
    assert fit.factor == pytest.approx((8 + 2 * 0.95 + 3) / (8 + 2 * 0.95 + 1))
    for _ in range(200):
        fit.count(1.0, 0)
    assert fit.factor == pytest.approx(8 / (8 + 20), abs=0.01)


def test_the_second_is_looked_at_seldom_and_from_the_start() -> None:
    rule = HybridRule()
    choices = [
        rule.choose(Text(), 5, first_length=5, draft_length=5) for _ in range(4 * LOOK_EVERY)
    ]
    looks = [use for use, choice in enumerate(choices, 1) if choice is Choice.FIRST_AND_LOOK]
    assert looks == [1, 2, 4, 8, 16, 32, 48, 64]
    # Each class has its own turn.
    assert rule.choose(Text(), 6, first_length=5, draft_length=5) is Choice.FIRST_AND_LOOK


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "pair",
    [(FIRST_RATES, PLAIN_HEAD), (CHAT, HEAD), (COPY, HEAD), (INVERTED, HEAD)],
    ids=["as believed", "chat", "copy", "inverted"],
)
def test_whatever_the_text_the_better_drafter_of_each_class_is_found(pair: Pair, seed: int) -> None:
    rule = HybridRule()
    # From the first step on,
    assert share_of_best(simulate(rule, [pair], sequences=30, seed=seed)) > 0.93
    # and once it has learned, in every class.
    learned = simulate(rule, [pair], sequences=150, seed=seed + 100)
    assert share_of_best(learned) > 0.98
    for total in learned.values():
        assert total.used / total.rows > 0.95 * max(total.first, total.second) / total.rows


def test_where_texts_differ_each_is_served_by_its_own_drafter() -> None:
    pairs = [(CHAT, HEAD), (COPY, HEAD)]
    with_texts = simulate(HybridRule(), pairs, sequences=150)
    without = simulate(HybridRule(), pairs, sequences=150, learns_texts=False)
    assert share_of_best(with_texts) > 0.95
    assert share_of_best(with_texts) > 1.1 * share_of_best(without)


def test_a_second_that_becomes_better_is_noticed_though_it_is_not_used() -> None:
    rule = HybridRule()
    trusted = [(COPY, PLAIN_HEAD)]
    simulate(rule, trusted, sequences=50)
    perfect = [Rates(0.99, 0.99)] * 8
    changed = simulate(rule, [(COPY, perfect)], sequences=50, seed=5)
    later = simulate(rule, [(COPY, perfect)], sequences=50, seed=6)
    assert share_of_best(changed) > 0.9
    assert share_of_best(later) > 0.98


def test_a_first_that_becomes_worse_is_noticed() -> None:
    rule = HybridRule()
    simulate(rule, [(COPY, HEAD)], sequences=50)
    changed = simulate(rule, [(CHAT, HEAD)], sequences=50, seed=5)
    later = simulate(rule, [(CHAT, HEAD)], sequences=50, seed=6)
    assert share_of_best(changed) > 0.92
    assert share_of_best(later) > 0.98
