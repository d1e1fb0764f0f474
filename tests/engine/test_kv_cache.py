"""The block pool never hands out a block twice, and accounts for every one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_blocks_are_owned_once_and_all_accounted_for(
    num_blocks: int, actions: list[tuple[bool, int]]
) -> None:
    pool = BlockPool(num_blocks)
    owned: list[list[int]] = []
    for is_allocation, number in actions:
        if is_allocation:
            free = pool.num_free
            if number > free:
                with pytest.raises(CacheFull, match=f"{number} blocks needed, {free} free"):
                    pool.allocate(number)
                assert pool.num_free == free
            else:
                owned.append(pool.allocate(number))
                assert len(owned[-1]) == number
        elif owned:
            pool.release(owned.pop(number % len(owned)))
        handed_out = [block for blocks in owned for block in blocks]
        assert len(set(handed_out)) == len(handed_out)
        assert all(0 < block < num_blocks for block in handed_out)
        assert pool.num_used == len(handed_out)
        assert pool.num_used + pool.num_free == pool.num_blocks - 1
    for blocks in owned:
        pool.release(blocks)
    assert sorted(pool.allocate(num_blocks - 1)) == list(range(1, num_blocks))


def test_releasing_what_is_not_handed_out_is_a_bug() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="block 0"):
        pool.release([0])
    with pytest.raises(AssertionError, match="block 4"):
        pool.release([4])
    assert pool.num_free == 3


def test_a_table_grows_to_its_tokens_or_not_at_all() -> None:
    pool = BlockPool(6)
    table: list[int] = []
    pool.grow(table, length=33, block_size=32)
    assert (len(table), pool.num_free) == (2, 3)
    pool.grow(table, length=64, block_size=32)
    pool.grow(table, length=1, block_size=32)
    assert (len(table), pool.num_free) == (2, 3)
    with pytest.raises(CacheFull):
        pool.grow(table, length=32 * 6, block_size=32)
    assert (len(table), pool.num_free) == (2, 3)
