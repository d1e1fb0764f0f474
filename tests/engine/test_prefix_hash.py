import time

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.prefix_hash import (
    EMPTY_PREFIX_HASH,
    PREFIX_HASH_ALGORITHM,
    extend_prefix_hash,
)

TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=50)


def test_the_prefix_hash_has_its_golden_values() -> None:
    assert PREFIX_HASH_ALGORITHM == "splitmix64-chain-1"
    assert EMPTY_PREFIX_HASH == 0x9E3779B97F4A7C15
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, []) == EMPTY_PREFIX_HASH
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, [0]) == 0x12C2C0A312A30281
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, [1, 2, 3]) == 0xECADC68B4C046429
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, range(1000)) == 0x8992DD4E309BD789


@settings(deadline=None)
@given(TOKEN_IDS, TOKEN_IDS)
def test_the_hash_does_not_depend_on_where_the_text_was_cut(
    first: list[int], second: list[int]
) -> None:
    whole = extend_prefix_hash(EMPTY_PREFIX_HASH, first + second)
    assert extend_prefix_hash(extend_prefix_hash(EMPTY_PREFIX_HASH, first), second) == whole
    assert 0 <= whole < 2**64


@settings(deadline=None)
@given(TOKEN_IDS.filter(len), st.data())
def test_one_changed_missing_or_swapped_token_changes_the_hash(
    token_ids: list[int], data: st.DataObject
) -> None:
    whole = extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids)
    index = data.draw(st.integers(0, len(token_ids) - 1))
    changed = [*token_ids[:index], token_ids[index] ^ 1, *token_ids[index + 1 :]]
    missing = token_ids[:index] + token_ids[index + 1 :]
    swapped = token_ids[index:] + token_ids[:index]
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, changed) != whole
    assert extend_prefix_hash(EMPTY_PREFIX_HASH, missing) != whole
    if swapped != token_ids:
        assert extend_prefix_hash(EMPTY_PREFIX_HASH, swapped) != whole


def test_short_texts_do_not_collide() -> None:
    hashes = {
        extend_prefix_hash(EMPTY_PREFIX_HASH, (first, second))
        for first in range(200)
        for second in range(200)
    }
    assert len(hashes) == 200 * 200


def test_a_prompt_of_4096_tokens_is_hashed_in_a_few_milliseconds() -> None:
    token_ids = list(range(40_000, 44_096))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.02
