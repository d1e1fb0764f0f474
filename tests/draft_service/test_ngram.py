import random
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.drafters.ngram import (
    DRAFT_LENGTH_PER_MATCHED_TOKEN,
    MAX_CANDIDATES,
    MAX_MATCH_LENGTH,
    SuffixIndex,
)

FEW_TOKENS = st.lists(st.integers(0, 3), max_size=MAX_CANDIDATES)
PIECES = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=12)


def index_of(token_ids: list[int]) -> SuffixIndex:
    index = SuffixIndex()
    index.extend(token_ids)
    return index


def common_suffix_length(token_ids: list[int], end: int) -> int:
    """How many tokens up to and with position `end` equal the last ones, up to the cap."""
    length = 0
    while (
        length < MAX_MATCH_LENGTH
        and length <= end
        and token_ids[end - length] == token_ids[-1 - length]
    ):
        length += 1
    return length


def proposal_by_scan(token_ids: list[int], draft_length: int) -> tuple[list[int], int]:
    """What `propose` promises, by looking at every earlier position."""
    lengths = {end: common_suffix_length(token_ids, end) for end in range(len(token_ids) - 1)}
    match_length = max(lengths.values(), default=0)
    if match_length == 0:
        return [], 0
    ends = [end for end, length in lengths.items() if length == match_length]
    if match_length == MAX_MATCH_LENGTH:
        end = ends[-1]
    else:
        following = [token_ids[end + 1] for end in ends]
        end = max(ends, key=lambda end: (following.count(token_ids[end + 1]), end))
    text = list(token_ids)
    for offset in range(min(draft_length, DRAFT_LENGTH_PER_MATCHED_TOKEN * match_length)):
        text.append(text[end + 1 + offset])
    return text[len(token_ids) :], match_length


@settings(deadline=None)
@given(FEW_TOKENS, st.integers(0, 12))
def test_a_proposal_is_what_a_scan_of_the_whole_text_finds(
    token_ids: list[int], draft_length: int
) -> None:
    assert index_of(token_ids).propose(draft_length) == proposal_by_scan(token_ids, draft_length)


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(1, 12), st.data())
def test_long_matches_are_what_a_scan_of_the_whole_text_finds(
    repeated_length: int, draft_length: int, data: st.DataObject
) -> None:
    repeated = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=repeated_length))
    between = data.draw(st.lists(st.integers(0, 5), max_size=8))
    token_ids = repeated + between + repeated + between + repeated
    assert index_of(token_ids).propose(draft_length) == proposal_by_scan(token_ids, draft_length)


@settings(deadline=None)
@given(PIECES)
def test_an_index_grown_in_pieces_equals_one_built_at_once(pieces: list[list[int]]) -> None:
    grown = SuffixIndex()
    for piece in pieces:
        grown.extend(piece)
    whole = [token_id for piece in pieces for token_id in piece]
    assert len(grown) == len(whole)
    assert vars(grown) == vars(index_of(whole))


@settings(deadline=None)
@given(PIECES, st.data())
def test_truncation_leaves_an_index_that_never_saw_the_rest(
    pieces: list[list[int]], data: st.DataObject
) -> None:
    index = SuffixIndex()
    kept: list[int] = []
    for piece in pieces:
        index.extend(piece)
        kept = kept + piece
        length = data.draw(st.integers(0, len(kept)))
        index.truncate(length)
        kept = kept[:length]
        assert vars(index) == vars(index_of(kept))
        assert index.propose(5) == index_of(kept).propose(5)


@settings(deadline=None)
@given(FEW_TOKENS, st.integers(0, 12))
def test_proposing_changes_nothing(token_ids: list[int], draft_length: int) -> None:
    index = index_of(token_ids)
    index.propose(draft_length)
    assert vars(index) == vars(index_of(token_ids))


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=200), st.integers(0, 9))
def test_a_proposal_continues_an_earlier_occurrence_of_the_matched_suffix(
    token_ids: list[int], draft_length: int
) -> None:
    token_ids = token_ids + token_ids[: len(token_ids) // 2]
    draft, match_length = index_of(token_ids).propose(draft_length)
    assert len(draft) == min(draft_length, DRAFT_LENGTH_PER_MATCHED_TOKEN * match_length)
    if match_length == 0:
        return
    text = token_ids + draft
    suffix = token_ids[len(token_ids) - match_length :]
    assert any(
        token_ids[end - match_length : end] == suffix and text[end : end + len(draft)] == draft
        for end in range(match_length, len(token_ids))
    )


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(0, 11), st.integers(1, 30), st.data())
def test_a_periodic_text_is_predicted_perfectly_even_beyond_its_end(
    period: int, extra: int, draft_length: int, data: st.DataObject
) -> None:
    unit = data.draw(st.permutations(range(period)))
    length = 16 + period + extra
    token_ids = [unit[position % period] for position in range(length + draft_length)]
    draft, match_length = index_of(token_ids[:length]).propose(draft_length)
    assert match_length == MAX_MATCH_LENGTH
    assert draft == token_ids[length:]


@pytest.mark.parametrize(
    ("token_ids", "draft", "match_length"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2, 3], [], 0),
        ([1, 2, 3, 1], [2, 3], 1),
        ([5, 1, 2, 3, 4, 9, 5, 1], [2, 3, 4, 9], 2),
        # The latest of two equally good continuations.
        ([1, 2, 8, 1, 3, 8, 1], [3, 8, 1, 3], 2),
        # The commonest next token, though another came later.
        ([1, 2, 7, 1, 2, 6, 1, 3, 5, 1], [2, 6], 1),
        # A longer match beats a later one and a commoner one.
        ([4, 5, 1, 9, 1, 2, 1, 2, 4, 5, 1], [9, 1, 2, 1, 2, 4], 3),
        ([7, 7], [7, 7], 1),
    ],
)
def test_short_texts_are_continued_as_one_would_by_hand(
    token_ids: list[int], draft: list[int], match_length: int
) -> None:
    assert index_of(token_ids).propose(8) == (draft, match_length)


def test_a_long_match_is_found_behind_many_occurrences_of_its_last_token() -> None:
    phrase = [10, 11, 12, 13, 0]
    noise = [token_id for number in range(5 * MAX_CANDIDATES) for token_id in (100 + number, 0)]
    draft, match_length = index_of([*phrase, 77, 78, *noise, *phrase]).propose(3)
    assert (draft, match_length) == ([77, 78, 100], 5)


def test_among_matches_of_full_length_the_latest_is_continued() -> None:
    phrase = list(range(20, 20 + MAX_MATCH_LENGTH))
    draft, match_length = index_of([*phrase, 1, *phrase, 1, *phrase, 2, *phrase]).propose(2)
    assert (draft, match_length) == ([2, 20], MAX_MATCH_LENGTH)


def test_token_ids_may_come_as_an_array_and_leave_as_python_integers() -> None:
    index = SuffixIndex()
    index.extend(np.array([2**32 - 1, 3, 2**32 - 1], dtype=np.uint32))
    draft, match_length = index.propose(4)
    assert (draft, match_length) == ([3, 2**32 - 1], 1)
    assert all(type(token_id) is int for token_id in draft)


def test_truncating_beyond_the_end_is_our_bug() -> None:
    index = index_of([1, 2, 3])
    for length in (-1, 4):
        with pytest.raises(AssertionError):
            index.truncate(length)


@pytest.mark.parametrize("kind", ["random", "skewed", "constant", "periodic"])
def test_a_proposal_takes_microseconds_however_long_the_text(kind: str) -> None:
    generator = random.Random(1)
    token_ids = {
        "random": [generator.randrange(49_152) for _ in range(40_000)],
        "skewed": [int(generator.paretovariate(0.6)) % 49_152 for _ in range(40_000)],
        "constant": [7] * 40_000,
        "periodic": [1, 2, 3, 4, 5] * 8_000,
    }[kind]
    index = index_of(token_ids)
    seconds = []
    for token_id in generator.sample(token_ids, 200):
        start = time.perf_counter()
        index.propose(8)
        seconds.append(time.perf_counter() - start)
        index.extend([token_id])
    # A scan of 40 000 tokens takes milliseconds; a proposal some tens of microseconds.
    assert sorted(seconds)[100] < 0.0005


def test_memory_grows_with_the_text_by_less_than_200_bytes_a_token() -> None:
    generator = random.Random(2)
    token_ids = [generator.randrange(49_152) for _ in range(32_768)]
    tracemalloc.start()
    try:
        index = SuffixIndex()
        for position in range(0, len(token_ids), 8):
            index.extend(token_ids[position : position + 8])
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 200 * len(index)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 8))
def test_replaying_a_text_with_its_own_drafts_gives_the_text(seed: int, draft_length: int) -> None:
    generator = random.Random(seed)
    words = [[generator.randrange(50) for _ in range(4)] for _ in range(6)]
    text = [token_id for _ in range(60) for token_id in generator.choice(words)]
    index = index_of(text[:20])
    steps = 0
    while len(index) < len(text):
        draft, _ = index.propose(draft_length)
        rest = text[len(index) :]
        accepted = 0
        while accepted < min(len(draft), len(rest) - 1) and draft[accepted] == rest[accepted]:
            accepted += 1
        index.extend(rest[: accepted + 1])
        steps += 1
    assert vars(index) == vars(index_of(text))
    # Four-token words repeat, so some drafts must be right.
    assert steps < len(text) - 20
