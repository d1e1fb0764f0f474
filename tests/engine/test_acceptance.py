import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.acceptance import Verdict, verify

TOKEN_IDS = st.integers(0, 3)


class Target:
    """A target that will say `token_ids` and remembers what it was asked."""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.asked: list[int] = []

    def __call__(self, row: int) -> int:
        self.asked.append(row)
        return self.token_ids[row]


@pytest.mark.parametrize(
    ("draft", "target", "accepted_length", "bonus_token_id"),
    [
        ([], [5], 0, 5),
        ([5, 6], [5, 6, 7], 2, 7),
        ([5, 9], [5, 6], 1, 6),
        ([9, 6], [5], 0, 5),
    ],
)
def test_a_draft_stands_up_to_its_first_difference(
    draft: list[int], target: list[int], accepted_length: int, bonus_token_id: int
) -> None:
    verdict = verify(draft, Target(target))
    assert verdict == Verdict(accepted_length=accepted_length, bonus_token_id=bonus_token_id)


@settings(deadline=None)
@given(st.lists(TOKEN_IDS, max_size=8), st.lists(TOKEN_IDS, min_size=9, max_size=9))
def test_the_emitted_tokens_are_the_targets_own_whatever_the_draft(
    draft: list[int], target_token_ids: list[int]
) -> None:
    target = Target(target_token_ids)
    verdict = verify(draft, target)
    emitted = verdict.emitted_token_ids(draft)
    assert emitted == target_token_ids[: len(emitted)]
    assert len(emitted) == verdict.accepted_length + 1
    stopped_early = verdict.accepted_length < len(draft)
    assert stopped_early == (emitted != [*draft, target_token_ids[len(draft)]])


@settings(deadline=None)
@given(st.lists(TOKEN_IDS, max_size=8), st.lists(TOKEN_IDS, min_size=9, max_size=9))
def test_the_target_is_asked_for_each_emitted_token_once_and_for_no_other(
    draft: list[int], target_token_ids: list[int]
) -> None:
    target = Target(target_token_ids)
    verdict = verify(draft, target)
    assert target.asked == list(range(verdict.accepted_length + 1))
