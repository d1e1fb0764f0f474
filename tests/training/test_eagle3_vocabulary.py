"""Which ids can be drafted, and how many fit a file."""

import pytest
from eagle3_support import rows_of

from training.data import Row
from training.draft_vocabulary import choose_draft_vocabulary, largest_size

ROWS = rows_of([Row([9, 9, 9, 4, 5, 4], 3), Row([1, 6, 5, 4], 1)])


def test_most_frequent_answer_tokens_and_forced_ids_are_chosen() -> None:
    # Answers hold 4 three times, 5 twice, 6 once; 9 is in a prompt only.
    choice = choose_draft_vocabulary(ROWS, size=3, vocab_size=12, always=[11])
    assert choice.ids.tolist() == [4, 5, 11]
    assert choice.coverage == pytest.approx(5 / 6)


def test_ids_that_never_occur_fill_up_from_the_lowest() -> None:
    choice = choose_draft_vocabulary(ROWS, size=6, vocab_size=12, always=[11])
    assert choice.ids.tolist() == [0, 1, 4, 5, 6, 11]
    assert choice.coverage == 1.0


def test_sizes_and_data_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="of 13 ids: must be 1 to 12"):
        choose_draft_vocabulary(ROWS, size=13, vocab_size=12, always=[])
    with pytest.raises(ValueError, match="has token id 9, and the target's vocabulary has 8"):
        choose_draft_vocabulary(ROWS, size=3, vocab_size=8, always=[])


def test_largest_size_stays_below_the_bound() -> None:
    size = largest_size(fixed_bytes=1000, bytes_per_id=10, max_bytes=4000, vocab_size=9999)
    assert size == 256
    # 128 ids would make exactly 1280 bytes, which is not below the bound.
    assert largest_size(fixed_bytes=0, bytes_per_id=10, max_bytes=1280, vocab_size=9999) == 64
    assert largest_size(fixed_bytes=0, bytes_per_id=10, max_bytes=4000, vocab_size=100) == 100
    with pytest.raises(ValueError, match="4000 bytes hold no head: 3900"):
        largest_size(fixed_bytes=3900, bytes_per_id=10, max_bytes=4000, vocab_size=9999)
