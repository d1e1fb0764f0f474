"""The commit rules, against a model that knows the whole text."""

from array import array

from hypothesis import given
from hypothesis import strategies as st
from link_client import hash_of

from draft_service.sessions import Commit, Session

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def session_of(text: list[int]) -> Session[None]:
    return Session(
        slot=0,
        generation=1,
        token_ids=array("i", text),
        prefix_hash=hash_of(text),
        state=None,
    )


@given(
    opening=tokens,
    text=st.lists(st.integers(0, 3), max_size=12),
    rows=st.lists(st.tuples(st.integers(0, 24), st.integers(0, 24), st.booleans()), max_size=10),
)
def test_a_session_holds_a_prefix_of_the_targets_text_that_only_grows(
    opening: list[int], text: list[int], rows: list[tuple[int, int, bool]]
) -> None:
    whole = [*opening, *text]
    session = session_of(opening)
    for base_length, count, is_lie in rows:
        base_length = min(base_length, len(whole))
        count = min(count, base_length)
        held = session.length
        outcome = session.commit(
            base_length=base_length,
            prefix_hash=hash_of(whole[:base_length]) ^ is_lie,
            count=count,
            token_ids=whole[base_length - count : base_length],
        )
        if base_length < len(opening):
            assert outcome is Commit.STALE
        elif base_length > held and base_length - count > held:
            assert outcome is Commit.GAP
        elif is_lie:
            assert outcome is Commit.MISMATCH
        elif base_length < held:
            assert outcome is Commit.STALE
        elif base_length == held:
            assert outcome is Commit.DUPLICATE
        else:
            assert outcome is Commit.APPLIED
            held = base_length
        assert session.token_ids.tolist() == whole[:held]


@given(opening=tokens, piece=st.integers(1, 5), is_lie=st.booleans())
def test_an_opening_is_checked_in_pieces(opening: list[int], piece: int, is_lie: bool) -> None:
    session = Session(
        slot=0,
        generation=1,
        token_ids=array("i", opening),
        prefix_hash=hash_of(opening) ^ is_lie,
        state=None,
    )
    pieces = -(-len(opening) // piece)
    results = [session.check_opening(piece) for _ in range(pieces)]
    assert results == [True] * (pieces - 1) + [not is_lie]
    assert session.is_checked is not is_lie


def test_a_count_larger_than_the_base_is_a_mismatch() -> None:
    session = session_of([1, 2])
    assert (
        session.commit(
            base_length=3, prefix_hash=hash_of([1, 2, 3]), count=4, token_ids=[0, 1, 2, 3]
        )
        is Commit.MISMATCH
    )
    assert session.length == 2
