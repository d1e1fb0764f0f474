"""Two drafters as one: who is asked, who serves where the other cannot, and what is learned."""

import json.decoder
import random
import re
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from fake_runner import BLOCK_SIZE, FakeRunner, next_token, pool_of
from feature_drafter import needs_of
from link_client import Row, drafts_in
from proposer_client import Driver
from scripted_drafter import ScriptedDrafter, ScriptedSequence

from draft_service.drafters.drafter import NO_PROPOSAL, FeatureRows, Proposal, Wish
from draft_service.drafters.hybrid import HybridDrafter, HybridSequence
from draft_service.drafters.hybrid_rule import Choice, HybridRule, Text
from draft_service.drafters.ngram_drafter import NgramDrafter
from draft_service.drafters.standalone import StandaloneDrafter
from draft_service.first_draft import first_draft
from outrider.engine.sampling import Sampling
from outrider.v1 import draft_pb2

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0, seed=3)
NEVER = float("inf")
# Ends in a long match, in none.
REPEATED = [1, 2, 3, 4, 5, 6, 7, 8] * 4
NEW = list(range(100, 120))
# What the scripted second says.
SECONDS = [90, 91, 92, 93, 94, 95, 96, 97]


def says(token_ids: Sequence[int], evidence: int = 0):
    return lambda committed, draft_length: Proposal(list(token_ids[:draft_length]), evidence)


def counts_up(committed: Sequence[int], draft_length: int, evidence: int = 0) -> Proposal:
    """Right wherever a text counts up."""
    return Proposal([committed[-1] + 1 + offset for offset in range(draft_length)], evidence)


def knows_nothing(committed: Sequence[int], draft_length: int) -> Proposal:
    return NO_PROPOSAL


def opened(
    drafter: HybridDrafter, token_ids: Sequence[int], sampling: Sampling = GREEDY
) -> HybridSequence:
    state = drafter.open(array("i", token_ids), sampling)
    assert drafter.reserve(state, len(token_ids))
    while drafter.backlog(state):
        drafter.prepare([state], 0.02)
    return state


def propose(drafter: HybridDrafter, *states: HybridSequence, draft_length: int = 5):
    for state in states:
        assert drafter.reserve(state, len(state.token_ids) + draft_length)
        assert drafter.backlog(state) <= drafter.max_backlog
    proposals = drafter.propose([Wish(state, draft_length, NEVER) for state in states])
    return [proposal.token_ids for proposal in proposals]


def batch_sizes(drafter: ScriptedDrafter) -> list[int]:
    return [len(batch) for batch in drafter.batches]


def pass_first_looks(drafter: HybridDrafter) -> None:
    """The second is asked for a look at a class's first, second, fourth and eighth time only."""
    state = opened(drafter, REPEATED)
    for _ in range(8):
        propose(drafter, state)
    drafter.close(state)


def test_each_row_has_its_drafter_and_the_second_is_asked_once_for_its_rows_only() -> None:
    second = ScriptedDrafter(says(SECONDS))
    drafter = HybridDrafter(NgramDrafter(), second)
    pass_first_looks(drafter)
    second.batches.clear()
    states = [opened(drafter, text) for text in (REPEATED, NEW, REPEATED, NEW)]
    assert propose(drafter, *states) == [[1, 2, 3, 4, 5], SECONDS[:5], [1, 2, 3, 4, 5], SECONDS[:5]]
    assert batch_sizes(second) == [2]
    assert propose(drafter, states[0]) == [[1, 2, 3, 4, 5]]
    assert batch_sizes(second) == [2]


def test_a_look_at_the_second_costs_no_token() -> None:
    second = ScriptedDrafter(says(SECONDS))
    drafter = HybridDrafter(NgramDrafter(), second)
    state = opened(drafter, REPEATED)
    for _ in range(32):
        assert propose(drafter, state) == [[1, 2, 3, 4, 5]]
    assert batch_sizes(second) == [1] * 6  # the 1st, 2nd, 4th, 8th, 16th, 32nd
    assert (
        drafter.words()
        == "ngram: 1 drafts, 0 tokens accepted; scripted: 0 drafts, 0 tokens accepted"
    )


def test_wishes_keep_their_time_and_each_drafter_its_bounds() -> None:
    first = ScriptedDrafter(knows_nothing, max_draft_length=3, max_sequence_length=22)
    second = ScriptedDrafter(says(SECONDS), max_draft_length=6, max_sequence_length=40)
    drafter = HybridDrafter(first, second)
    assert (drafter.offer.max_draft_length, drafter.offer.max_sequence_length) == (6, 40)
    state = opened(drafter, NEW)
    (proposal,) = drafter.propose([Wish(state, 6, 12.5)])
    assert proposal.token_ids == SECONDS[:6]
    assert [wish[1:] for wish in first.batches[0]] == [(2, 12.5, None)]
    assert [wish[1:] for wish in second.batches[0]] == [(6, 12.5, None)]


def test_a_first_that_is_right_in_the_shadow_is_used_though_nobody_believed_in_it() -> None:
    first = ScriptedDrafter(lambda *asked: counts_up(*asked, evidence=1))
    drafter = HybridDrafter(first, ScriptedDrafter(says(SECONDS), name="second"))
    state = opened(drafter, [0])
    used = []
    for _ in range(12):
        (draft,) = propose(drafter, state)
        used.append(draft == SECONDS[:5])
        # The text goes on as the first says.
        state.token_ids.extend(counts_up(state.token_ids, 3).token_ids)
    assert used[0]
    assert not used[-1]
    assert used == sorted(used, reverse=True)


def test_only_what_was_committed_counts_when_a_sequence_ends_early() -> None:
    first = ScriptedDrafter(lambda *asked: counts_up(*asked, evidence=1))
    second = ScriptedDrafter(knows_nothing)
    drafter = HybridDrafter(first, second)
    rule = drafter._rules_of_greedy.row
    before = [rule.expected_of_first(1, length) for length in (1, 2, 3, 4)]
    state = opened(drafter, [0])
    propose(drafter, state)
    state.token_ids.extend([1, 2])
    drafter.close(state)
    after = [rule.expected_of_first(1, length) for length in (1, 2, 3, 4)]
    rates = [after[0], (after[1] - after[0]) / after[0]]
    assert rates == pytest.approx(
        [(1 + 8 * 0.995 * 0.25) / (1 + 8 * 0.995), (1 + 8 * 0.995 * 0.63) / (1 + 8 * 0.995)]
    )
    # The third token was never there: neither right nor wrong.
    assert (after[2] - after[1]) / (after[1] - after[0]) == pytest.approx(0.63)
    assert before[0] == 0.25
    assert drafter.words().startswith("scripted: 1 drafts, 2 tokens accepted")
    assert not first.states
    assert not second.states


def test_a_draft_asked_for_again_counts_once() -> None:
    drafter = HybridDrafter(
        ScriptedDrafter(lambda *asked: counts_up(*asked, evidence=1)),
        ScriptedDrafter(knows_nothing),
    )
    state = opened(drafter, [0])
    for _ in range(50):
        propose(drafter, state)
    assert len(state.trials) == 1
    state.token_ids.append(1)
    propose(drafter, state)
    assert len(state.trials) == 2
    state.token_ids.extend([77] * 3)
    propose(drafter, state)
    assert len(state.trials) == 1
    assert drafter.words().startswith("scripted: 3 drafts, 1 tokens accepted")


def test_a_second_that_is_shorter_than_wished_is_worth_less() -> None:
    short = ScriptedDrafter(lambda committed, draft_length: counts_up(committed, 1))
    drafter = HybridDrafter(NgramDrafter(), short)
    state = opened(drafter, [0])
    for _ in range(60):
        propose(drafter, state)
        state.token_ids.append(state.token_ids[-1] + 1)
    assert drafter._rules_of_greedy.row.expected_of_second(0, 5) == pytest.approx(1, abs=0.15)


def test_where_the_second_has_nothing_the_first_serves() -> None:
    first = ScriptedDrafter(says([7, 8, 9], evidence=1))
    second = ScriptedDrafter(knows_nothing)
    drafter = HybridDrafter(first, second)
    state = opened(drafter, NEW)
    assert propose(drafter, state) == [[7, 8, 9]]
    assert batch_sizes(second) == [1]


def test_where_neither_has_anything_there_is_no_draft() -> None:
    drafter = HybridDrafter(NgramDrafter(), ScriptedDrafter(knows_nothing))
    assert propose(drafter, opened(drafter, NEW)) == [[]]


def test_features_go_to_the_one_that_needs_them() -> None:
    features = FeatureRows(first_position=0, rows=b"rows")
    late = FeatureRows(first_position=9, rows=b"rows")
    needy = ScriptedDrafter(says(SECONDS), feature_needs=needs_of())
    for pair in ((NgramDrafter(), needy), (needy, NgramDrafter())):
        drafter = HybridDrafter(*pair)
        assert drafter.offer.feature_needs == needs_of()
        state = opened(drafter, NEW)
        assert drafter.add_features(state, features)
        assert not drafter.add_features(state, late)
    assert needy.given == [features, late] * 2
    needy.memory = 0
    assert drafter.reserve(state, 30)
    # Of no use any more, and nothing that an Open could mend.
    assert drafter.add_features(state, late)


def test_the_offer_names_what_it_is_made_of() -> None:
    assert HybridDrafter(NgramDrafter(), NgramDrafter()).offer.feature_needs is None
    needy = ScriptedDrafter(says(SECONDS), name="needy", feature_needs=needs_of())
    offer = HybridDrafter(needy, needy).offer
    assert (offer.name, offer.fingerprint) == ("hybrid", "fingerprint of needy")
    assert offer.feature_needs == needs_of()
    other = ScriptedDrafter(says(SECONDS), name="other", feature_needs=needs_of(b"other weights"))
    with pytest.raises(ValueError, match=r"needy needs .*, other needs .*: must be the same"):
        HybridDrafter(needy, other)


def test_a_second_without_memory_leaves_the_sequence_to_the_first() -> None:
    runner, pool = FakeRunner(), pool_of(12)
    second = StandaloneDrafter(
        runner=runner,
        block_pool=pool,
        eos_token_ids=frozenset(),
        fingerprint="fake",
        step_seconds=((1, 0.01),),
    )
    driver = Driver(HybridDrafter(NgramDrafter(), second))
    driver.open((0, REPEATED), (1, REPEATED))
    driver.prepare()
    assert driver.client.rows_seen("refuse") == []
    draft = driver.step(Row(0, REPEATED, 0), Row(1, REPEATED, 0))
    assert drafts_in(draft) == {0: [1, 2, 3, 4], 1: [1, 2, 3, 4]}
    # The first sequence filled the pool: what it cannot have any more it gives back.
    text = [*REPEATED, *range(1, 9), *range(1, 9)]
    assert drafts_in(driver.step(Row(0, text, 16))) == {0: [1, 2, 3, 4]}
    assert len(pool.allocate(12)) * BLOCK_SIZE == 48


def test_without_memory_for_either_a_sequence_is_refused() -> None:
    first, second = ScriptedDrafter(knows_nothing), ScriptedDrafter(knows_nothing)
    first.memory = second.memory = 10
    driver = Driver(HybridDrafter(first, second))
    driver.open((0, REPEATED))
    assert driver.client.rows_seen("refuse") == []
    driver.answers()
    assert driver.client.rows_seen("refuse") == [(0, 1, draft_pb2.REFUSE_REASON_CAPACITY)]
    assert not first.states
    assert not second.states


def test_where_the_second_ends_the_first_goes_on_and_where_both_end_there_is_no_draft() -> None:
    first = ScriptedDrafter(knows_nothing, max_sequence_length=34)
    second = ScriptedDrafter(says(SECONDS), max_sequence_length=22)
    driver = Driver(HybridDrafter(first, second))
    driver.open((0, NEW))
    driver.prepare()
    first.script = says([60], evidence=1)
    text, drafts = NEW, []
    for _ in range(14):
        text = [*text, len(text)]
        drafts.append(drafts_in(driver.step(Row(0, text)))[0])
    # The second has room for one more token, then the first for twelve.
    assert drafts == [SECONDS[:1], *[[60]] * 12, []]
    assert driver.client.rows_seen("refuse") == []
    assert not second.states
    driver.step(Row(0, [*text, 1]))
    assert driver.client.rows_seen("refuse") == [(0, 1, draft_pb2.REFUSE_REASON_TOO_LONG)]


def test_a_long_prompt_is_served_by_the_first_while_the_second_is_behind() -> None:
    second = ScriptedDrafter(says(SECONDS))
    driver = Driver(HybridDrafter(NgramDrafter(), second))
    prompt = REPEATED * 5
    driver.open((0, prompt))
    assert drafts_in(driver.step(Row(0, prompt, 0))) == {0: [1, 2, 3, 4]}
    for _ in range(3):
        driver.proposer.prepare()
    assert drafts_in(driver.step(Row(0, prompt, 0))) == {0: [1, 2, 3, 4]}
    assert second.backlog(second.states[0]) > second.max_backlog
    assert not second.batches
    driver.prepare()
    assert second.backlog(second.states[0]) == 0
    text = [*prompt, 99]
    assert drafts_in(driver.step(Row(0, text))) == {0: SECONDS[:4]}


def test_a_prompt_too_long_for_the_first_to_be_ready_goes_to_it_first() -> None:
    first = ScriptedDrafter(says([7], evidence=9))
    second = ScriptedDrafter(says(SECONDS))
    driver = Driver(HybridDrafter(first, second))
    driver.open((0, REPEATED), (1, REPEATED))
    assert drafts_in(driver.step(Row(0, REPEATED, 0))) == {0: []}
    while not first.batches:
        driver.proposer.prepare()
        driver.step(Row(0, REPEATED, 0), Row(1, REPEATED, 0))
    assert second.piece_count == 0
    driver.prepare()
    assert [second.backlog(state) for state in second.states] == [0, 0]
    assert [first.backlog(state) for state in first.states] == [0, 0]


@pytest.mark.parametrize("draft_length", [2, 4, 8])
def test_rows_of_the_first_never_put_the_second_out_of_reach(draft_length: int) -> None:
    second = ScriptedDrafter(says(SECONDS))
    driver = Driver(HybridDrafter(NgramDrafter(), second))
    text = list(REPEATED)
    driver.open((0, text))
    driver.prepare()
    backlogs, pieces = [], second.piece_count
    for _ in range(60):
        # Everything is accepted: the fastest that a backlog can grow.
        row = Row(0, text, draft_length + 1, draft_length)
        draft = drafts_in(driver.step(row))[0]
        backlogs.append(second.backlog(second.states[0]))
        driver.prepare()
        text = [*text, *draft]
        text.append(text[-8])
    assert len(text) == len(REPEATED) + 60 * (draft_length + 1)
    # Now and then it has to work, but not in every step where drafts are short.
    assert 0 < max(backlogs) <= second.max_backlog
    assert (second.piece_count - pieces) * 4 >= len(text) - len(REPEATED) - 60
    assert draft_length > 2 or backlogs.count(0) < 30


def test_commits_without_drafts_are_worked_off_too() -> None:
    second = ScriptedDrafter(says(SECONDS))
    driver = Driver(HybridDrafter(NgramDrafter(), second))
    text = list(NEW)
    driver.open((0, text))
    driver.prepare()
    for number in range(100):
        text = [*text, 200 + number]
        driver.receive(step=driver.client.step_of(Row(0, text, 1, draft_length=0)))
        driver.prepare()
        assert second.backlog(second.states[0]) <= second.max_backlog
    assert drafts_in(driver.step(Row(0, text, 0))) == {0: SECONDS[:4]}


def test_a_second_that_waits_for_features_neither_stops_the_first_nor_keeps_it_busy() -> None:
    second = ScriptedDrafter(says(SECONDS), feature_needs=needs_of())
    second.prepare = lambda states, budget_seconds: None
    driver = Driver(HybridDrafter(NgramDrafter(), second))
    driver.open((0, REPEATED))
    driver.prepare()
    text = list(REPEATED)
    for _ in range(10):
        text = [*text, text[-8]]
        expected = text[-8:-4]
        assert drafts_in(driver.step(Row(0, text))) == {0: expected}
        driver.prepare()
        assert not driver.proposer.has_unprepared
    assert not second.batches


def test_prompt_lookup_and_a_model_together_draft_as_each_alone_would() -> None:
    pool = pool_of(200)
    second = StandaloneDrafter(
        runner=FakeRunner(),
        block_pool=pool,
        eos_token_ids=frozenset(),
        fingerprint="fake",
        step_seconds=((1, 0.01), (64, 0.02)),
    )
    drafter = HybridDrafter(NgramDrafter(), second)
    evidence = first_draft(drafter, vocab_size=50)
    assert evidence.draft_token_ids
    driver = Driver(drafter)
    text = list(range(30))
    driver.open((0, text))
    driver.prepare()
    rng = random.Random(1)
    served = set()
    for _ in range(60):
        draft = drafts_in(driver.step(Row(0, text, min(6, len(text)))))[0]
        model = list(text)
        for _ in range(4):
            model.append(next_token(0, model, GREEDY))
        by_model = draft == model[len(text) :]
        served.add(by_model)
        # Sometimes the text goes on as the model has it, sometimes it repeats what was there.
        more = model[len(text) :][: rng.randrange(1, 5)] if rng.random() < 0.5 else text[2:7]
        text = [*text, *more]
        driver.prepare()
    assert served == {True, False}
    driver.proposer.detach(driver.terms)
    assert len(pool.allocate(200)) == 200


class GuidedDrafter(ScriptedDrafter):
    """Asks the guide at each position, with a probability that a test sets."""

    probability = 0.5

    def propose(self, wishes: Sequence[Wish[ScriptedSequence]]) -> list[Proposal]:
        return [
            Proposal(self.guided(wish, proposal.token_ids))
            for wish, proposal in zip(wishes, super().propose(wishes), strict=True)
        ]

    def guided(self, wish: Wish[ScriptedSequence], token_ids: Sequence[int]) -> list[int]:
        draft: list[int] = []
        for token_id in token_ids:
            assert wish.guide is not None
            draft.append(wish.guide.choose(draft, token_id, lambda: self.probability))
        return draft


# Ends in a match of one token, behind which a long one begins.
ONE_MATCHES = [*range(1, 20), 50, 1]


def test_the_first_guides_the_second_where_its_match_says_more_than_the_seconds_own_word() -> None:
    second = GuidedDrafter(says([70, 3, 4, 5, 6]))
    drafter = HybridDrafter(NgramDrafter(), second)
    second.probability = 0.3
    # A match of one token is not enough; behind the second's tokens there is none.
    assert propose(drafter, opened(drafter, ONE_MATCHES)) == [[70, 3, 4, 5, 6]]
    # Behind 1, 2, 3, which both have, it says 4: three tokens are.
    second.script = says([2, 3, 70, 71, 72])
    assert propose(drafter, opened(drafter, ONE_MATCHES)) == [[2, 3, 4, 5, 6]]
    second.probability = 0.9
    assert propose(drafter, opened(drafter, ONE_MATCHES)) == [[2, 3, 70, 71, 72]]


def test_the_guide_leaves_the_first_as_it_was() -> None:
    first = NgramDrafter()
    drafter = HybridDrafter(first, GuidedDrafter(says([2, 3, 70, 71, 72])))
    state = opened(drafter, ONE_MATCHES)
    propose(drafter, state)
    assert len(state.first.state.index) == len(ONE_MATCHES)
    alone = first.open(state.token_ids, GREEDY)
    assert first.propose([Wish(alone, 5, NEVER)]) == first.propose(
        [Wish(state.first.state, 5, NEVER)]
    )


# The first has no match, until something is drafted.
NO_MATCH = [*range(1, 20), 50]


def drafts_before(
    drafter: HybridDrafter, committed: Sequence[int], sampling: Sampling = GREEDY
) -> list[list[int]]:
    """Of sequences one after the other, each of which goes on so behind its draft."""
    drafts = []
    for _ in range(12):
        state = opened(drafter, NO_MATCH, sampling)
        drafts.append(propose(drafter, state, draft_length=3)[0])
        state.token_ids.extend(committed)
        drafter.close(state)
    return drafts


def test_which_of_the_two_is_right_is_learned_from_what_is_committed() -> None:
    """The second is sure and wrong where the first contradicts it."""
    second = GuidedDrafter(says([1, 70, 71]))
    second.probability = 0.9
    drafts = drafts_before(HybridDrafter(NgramDrafter(), second), [1, 2])
    assert drafts[0] == [1, 70, 71]
    assert drafts[-1] == [1, 2, 71]
    # One change, then never back.
    assert sum(left != right for left, right in pairwise(drafts)) == 1


@pytest.mark.parametrize("committed", [[60, 2, 3], [1], []], ids=["wrong before", "end", "none"])
def test_a_dispute_that_nobody_can_settle_teaches_nothing(committed: list[int]) -> None:
    second = GuidedDrafter(says([1, 70, 71]))
    second.probability = 0.9
    drafts = drafts_before(HybridDrafter(NgramDrafter(), second), committed)
    assert drafts == [[1, 70, 71]] * 12


def test_a_dispute_of_a_draft_asked_for_again_counts_once() -> None:
    second = GuidedDrafter(says([1, 70, 71]))
    second.probability = 0.9
    drafter = HybridDrafter(NgramDrafter(), second)
    state = opened(drafter, NO_MATCH)
    for _ in range(50):
        propose(drafter, state, draft_length=3)
    state.token_ids.extend([1, 2])
    drafter.close(state)
    assert drafts_before(drafter, [])[0] == [1, 70, 71]


def test_greedy_and_sampled_requests_are_learned_of_apart() -> None:
    second = GuidedDrafter(says([1, 70, 71]))
    second.probability = 0.9
    drafter = HybridDrafter(NgramDrafter(), second)
    assert drafts_before(drafter, [1, 2], SAMPLED)[-1] == [1, 2, 71]
    assert drafts_before(drafter, [1, 70])[0] == [1, 70, 71]
    assert drafts_before(drafter, [], SAMPLED)[0] == [1, 2, 71]


def test_how_far_drafts_get_is_learned_of_greedy_and_sampled_requests_apart() -> None:
    first = ScriptedDrafter(lambda *asked: counts_up(*asked, evidence=1))
    drafter = HybridDrafter(first, ScriptedDrafter(says(SECONDS), name="second"))
    for _ in range(12):
        state = opened(drafter, NEW, SAMPLED)
        propose(drafter, state)
        state.token_ids.extend(counts_up(NEW, 5).token_ids)
        drafter.close(state)
    assert propose(drafter, opened(drafter, NEW)) == [SECONDS[:5]]
    assert propose(drafter, opened(drafter, NEW, SAMPLED)) == [counts_up(NEW, 5).token_ids]


def test_without_the_capability_or_where_it_is_behind_there_is_no_guide() -> None:
    for first in (ScriptedDrafter(knows_nothing), NgramDrafter()):
        second = ScriptedDrafter(says(SECONDS))
        drafter = HybridDrafter(first, second)
        state = drafter.open(array("i", range(400)), GREEDY)
        assert drafter.reserve(state, 410)
        while second.backlog(second.states[0]):
            second.prepare(second.states, 0.02)
        drafter.propose([Wish(state, 5, NEVER)])
        assert [wish.guide for wish in second.batches[0]] == [None]


def replay(drafter: HybridDrafter, token_ids: list[int], start: int = 200) -> float:
    """Mean accepted length over a text that is known."""
    state = opened(drafter, token_ids[:start])
    accepted = drafts = 0
    length = start
    while length < len(token_ids) - 6:
        if drafter.backlog(state) > drafter.max_backlog // 2:
            drafter.prepare([state], 0.02)
        (draft,) = propose(drafter, state)
        count = 0
        while count < len(draft) and draft[count] == token_ids[length + count]:
            count += 1
        accepted += count
        drafts += 1
        length += count + 1
        state.token_ids.extend(token_ids[len(state.token_ids) : length])
    drafter.close(state)
    return accepted / drafts


class FromMatchOf(HybridRule):
    """A fixed rule: the first from this class on."""

    def __init__(self, lowest_class: int) -> None:
        super().__init__()
        self.lowest_class = lowest_class

    def choose(
        self, text: Text, evidence_class: int, *, first_length: int, draft_length: int
    ) -> Choice:
        return Choice.FIRST if evidence_class >= self.lowest_class else Choice.SECOND


@pytest.mark.parametrize("rate", [0.2, 0.4, 0.6, 0.8])
def test_over_a_real_text_it_does_as_the_best_fixed_rule_whatever_the_second_is_worth(
    rate: float,
) -> None:
    words = re.findall(r"\w+|[^\w\s]", Path(json.decoder.__file__).read_text(encoding="utf-8"))
    ids = {word: number for number, word in enumerate(dict.fromkeys(words))}
    token_ids = [ids[word] for word in words]

    def knows_the_text(committed: Sequence[int], draft_length: int) -> Proposal:
        """Each token is right with a probability of `rate`, and always the same ones are."""
        start = len(committed)
        ends = min(start + draft_length, len(token_ids))
        return Proposal(
            [
                token_ids[position] if random.Random(f"{start} {position}").random() < rate else -2
                for position in range(start, ends)
            ]
        )

    def with_rule(rule: HybridRule) -> float:
        second = ScriptedDrafter(knows_the_text, max_sequence_length=10**6)
        drafter = HybridDrafter(NgramDrafter(), second)
        drafter._rules_of_greedy.row = rule
        return replay(drafter, token_ids)

    # From any match on, from a longer one on, ..., never.
    fixed = [with_rule(FromMatchOf(lowest)) for lowest in (1, 2, 3, 4, 5, 8)]
    # The best rule is another one for each second; learning which costs little.
    assert max(fixed) > 1.03 * min(fixed)
    assert with_rule(HybridRule()) > 0.96 * max(fixed)
