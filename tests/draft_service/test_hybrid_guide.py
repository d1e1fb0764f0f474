"""Who gets a disputed position: what is learned, and which disputes are settled when."""

import random
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.drafter import NO_PROPOSAL, Proposal
from draft_service.drafters.hybrid_guide import (
    FIRST_RATES,
    NUM_BUCKETS,
    Dispute,
    DisputeTrial,
    GuideRule,
    Rate,
    RowGuide,
)
from draft_service.drafters.hybrid_rule import CLASS_BOUNDS

FIRST, SECOND, NEITHER = 1, 2, 3


def dispute(evidence_class: int = 3, bucket: int = 10, offset: int = 0) -> Dispute:
    return Dispute(offset, FIRST, SECOND, evidence_class, bucket)


class RecordingRule(GuideRule):
    """Prefers the first throughout, and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: list[tuple[int, int]] = []

    def prefers_first(self, dispute: Dispute) -> bool:
        return True

    def count(self, dispute: Dispute, token_id: int) -> None:
        self.counted.append((dispute.offset, token_id))


def never() -> float:
    raise AssertionError("nothing to be sure of")


def test_before_anything_was_seen_longer_matches_and_a_more_doubtful_head_favour_the_first() -> (
    None
):
    rule = GuideRule()
    assert len(FIRST_RATES) == len(CLASS_BOUNDS) + 1
    preferred = [
        [
            bucket
            for bucket in range(NUM_BUCKETS)
            if rule.prefers_first(dispute(evidence_class, bucket))
        ]
        for evidence_class in range(len(FIRST_RATES))
    ]
    counts = [len(buckets) for buckets in preferred]
    assert counts == sorted(counts)
    assert counts == [0, 2, 5, 8, 9, 12, 12, 16]
    assert all(buckets == list(range(len(buckets))) for buckets in preferred)


def test_a_rate_is_that_of_late_and_begins_as_believed() -> None:
    rate = Rate(0.25)
    assert rate.value == pytest.approx(0.25)
    rate.count(True)
    assert rate.value == pytest.approx((0.995 * 2 + 1) / (0.995 * 8 + 1))
    rng = random.Random(1)
    for expected in (0.7, 0.1):
        values = []
        for number in range(2000):
            rate.count(rng.random() < expected)
            values.append(rate.value)
            assert number < 1000 or rate.value == pytest.approx(expected, abs=0.13)
        assert sum(values[1000:]) / 1000 == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("is_inverted", [False, True], ids=["as believed", "inverted"])
def test_whoever_is_right_more_often_is_found(is_inverted: bool) -> None:
    rng = random.Random(2)
    firsts = [0.0, 0.05, 0.15, 0.25, 0.35, 0.5, 0.6, 0.8]
    seconds = [0.9 * (bucket + 0.5) / NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
    if is_inverted:
        firsts, seconds = firsts[::-1], seconds[::-1]
    rule = GuideRule()
    right = best = 0.0
    for number in range(20_000):
        evidence_class, bucket = rng.randrange(1, 8), rng.randrange(NUM_BUCKETS)
        rates = firsts[evidence_class], seconds[bucket]
        asked = dispute(evidence_class, bucket)
        if number >= 5000:
            right += rates[0 if rule.prefers_first(asked) else 1]
            best += max(rates)
        # Only one can be right; where both would be, the draws are made again.
        while (drawn := (rng.random() < rates[0], rng.random() < rates[1])) == (True, True):
            pass
        rule.count(asked, FIRST if drawn[0] else SECOND if drawn[1] else NEITHER)
    assert right > 0.96 * best


def test_only_where_the_two_differ_is_there_a_dispute() -> None:
    answers = {(): Proposal([7], 3), (7,): Proposal([8], 4), (7, 8): NO_PROPOSAL}
    guide = RowGuide(lambda draft: answers[tuple(draft)], RecordingRule())
    assert guide.choose([], 7, never) == 7
    assert guide.choose([7], 9, lambda: 0.34) == 8
    assert guide.choose([7, 8], 5, never) == 5
    assert guide.disputes == [Dispute(1, 8, 9, evidence_class=4, bucket=6)]


@pytest.mark.parametrize(("probability", "bucket"), [(0.0, 0), (0.0499, 0), (0.99, 19), (1.0, 19)])
def test_probabilities_fall_into_twenty_buckets(probability: float, bucket: int) -> None:
    guide = RowGuide(lambda draft: Proposal([1], 16), GuideRule())
    guide.choose([], 2, lambda: probability)
    assert [each.bucket for each in guide.disputes] == [bucket]


def test_the_seconds_token_stays_where_the_first_is_right_less_often() -> None:
    guide = RowGuide(lambda draft: Proposal([1], 1), GuideRule())
    assert guide.choose([], 2, lambda: 0.5) == 2
    assert guide.choose([2], 2, lambda: 0.01) == 1
    assert [each.offset for each in guide.disputes] == [0, 1]


def test_a_dispute_is_settled_once_when_its_token_is_there() -> None:
    rule = RecordingRule()
    disputes = [dispute(offset=0), dispute(offset=2), dispute(offset=4)]
    trial = DisputeTrial([10, 11, 12, 13, 14], disputes, start=2, rule=rule)
    committed = array("i", [0, 0])
    counts = []
    for token_id in (10, 11, 12, 13):
        assert not trial.compare(committed)
        assert not trial.compare(committed)
        counts.append(len(rule.counted))
        committed.append(token_id)
    assert counts == [0, 1, 1, 2]
    assert not trial.compare(committed)
    committed.append(99)
    assert trial.compare(committed)
    assert rule.counted == [(0, 10), (2, 12), (4, 99)]


def test_behind_a_wrong_token_nothing_is_settled_but_at_it_there_is() -> None:
    rule = RecordingRule()
    disputes = [dispute(offset=1), dispute(offset=2)]
    trial = DisputeTrial([10, 11, 12], disputes, start=0, rule=rule)
    assert trial.compare(array("i", [10, 77, 12, 13]))
    assert rule.counted == [(1, 77)]
    other = DisputeTrial([10, 11, 12], disputes, start=0, rule=rule)
    assert other.compare(array("i", [77]))
    assert rule.counted == [(1, 77)]


@given(st.data())
def test_in_whatever_pieces_the_tokens_come_the_same_is_settled(data: st.DataObject) -> None:
    draft = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
    text = array("i", data.draw(st.lists(st.integers(0, 1), max_size=8)))
    offsets = sorted(data.draw(st.sets(st.integers(0, len(draft) - 1))))
    rule = RecordingRule()
    trial = DisputeTrial(draft, [dispute(offset=each) for each in offsets], start=0, rule=rule)
    is_settled = False
    for end in sorted({*data.draw(st.sets(st.integers(0, len(text)))), len(text)}):
        is_settled = is_settled or trial.compare(text[:end])
    assert rule.counted == settled_at_once(draft, text, offsets)


def settled_at_once(
    draft: Sequence[int], text: Sequence[int], offsets: Sequence[int]
) -> list[tuple[int, int]]:
    return [
        (offset, text[offset])
        for offset in offsets
        if offset < len(text) and list(text[:offset]) == list(draft[:offset])
    ]
