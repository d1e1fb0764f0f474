"""The n-gram drafter as one that continues others' drafts."""

import statistics
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters import ngram_drafter
from draft_service.drafters.drafter import NO_PROPOSAL, Continues, Proposal, Wish
from draft_service.drafters.ngram import SuffixIndex
from draft_service.drafters.ngram_drafter import TOKENS_PER_PIECE, NgramDrafter
from outrider.engine.sampling import Sampling

GREEDY = Sampling(temperature=0.0)
TOKENS = st.lists(st.integers(0, 3), max_size=40)


def index_of(token_ids: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(token_ids)
    return index


@settings(deadline=None)
@given(TOKENS, st.integers(0, 40), st.lists(st.lists(st.integers(0, 4), max_size=8), max_size=4))
def test_drafts_are_continued_as_if_they_were_committed_and_leave_nothing_behind(
    token_ids: list[int], indexed: int, drafts: list[list[int]]
) -> None:
    drafter = NgramDrafter()
    state = drafter.open(array("i", token_ids), GREEDY)
    state.catch_up(indexed)
    for draft in drafts:
        expected = Proposal(*index_of(token_ids + draft).propose(1))
        assert drafter.continue_from(state, draft) == expected
        assert vars(state.index) == vars(index_of(token_ids))
    assert state.token_ids.tolist() == token_ids
    (proposal,) = drafter.propose([Wish(state, 5, float("inf"))])
    assert proposal == Proposal(*index_of(token_ids).propose(5))


def test_it_is_one_that_continues() -> None:
    assert isinstance(NgramDrafter(), Continues)


def test_while_it_is_behind_it_knows_nothing_and_does_nothing() -> None:
    drafter = NgramDrafter()
    state = drafter.open(array("i", [1, 2, 3, 4] * TOKENS_PER_PIECE), GREEDY)
    assert drafter.continue_from(state, [1]) == NO_PROPOSAL
    assert len(state.index) == 0
    while drafter.backlog(state) > drafter.max_backlog:
        drafter.prepare([state], 0.02)
    assert drafter.continue_from(state, [1]) == Proposal([2], 16)
    assert drafter.backlog(state) == 0


def test_beyond_the_longest_sequence_it_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_drafter, "MAX_SEQUENCE_LENGTH", 10)
    drafter = NgramDrafter()
    state = drafter.open(array("i", [1, 2] * 4), GREEDY)
    assert drafter.continue_from(state, [1]) == Proposal([2], 7)
    assert drafter.continue_from(state, [1, 2]) == NO_PROPOSAL


def test_a_continuation_takes_microseconds() -> None:
    drafter = NgramDrafter()
    state = drafter.open(array("i", [number * number % 997 for number in range(2000)]), GREEDY)
    while drafter.backlog(state):
        drafter.prepare([state], 0.02)
    seconds = []
    for number in range(200):
        draft = [number, number + 1, number + 2, number + 3]
        started = time.perf_counter()
        drafter.continue_from(state, draft)
        seconds.append(time.perf_counter() - started)
    # About 10, on a core that others use too.
    assert statistics.median(seconds) < 100e-6
