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


def test_a_named_block_can_be_held_by_several_and_outlives_them() -> None:
    pool = BlockPool(5)
    first, second = pool.allocate(2)
    pool.name(first, b"a")
    assert pool.take(b"b") is None
    assert pool.take(b"a") == first
    pool.release([first, second])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (1, 0, 3)
    pool.release([first])
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 1, 3)
    assert pool.take(b"a") == first
    assert pool.num_used == 1
    pool.release([first])
    with pytest.raises(AssertionError, match="released twice"):
        pool.release([first])


def test_contents_go_when_space_is_needed_the_oldest_text_first_and_from_its_end() -> None:
    pool = BlockPool(6)
    old = pool.allocate(2)
    new = pool.allocate(2)
    for block, name in zip([*old, *new], [b"a", b"b", b"c", b"d"], strict=True):
        pool.name(block, name)
    pool.release(old)
    pool.release(new)
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 4, 5)
    # The free one, and then the end of the text that was released first.
    pool.allocate(2)
    assert pool.take(b"b") is None
    # Held again, and so released last.
    assert pool.take(b"a") == old[0]
    pool.release([old[0]])
    pool.allocate(2)
    assert pool.take(b"c") is None and pool.take(b"d") is None
    assert pool.take(b"a") == old[0]
    with pytest.raises(CacheFull, match="1 blocks needed, 0 free of 5"):
        pool.allocate(1)


def test_of_two_blocks_with_the_same_contents_one_has_the_name() -> None:
    pool = BlockPool(4)
    one, other = pool.allocate(2)
    pool.name(one, b"a")
    pool.name(other, b"a")
    pool.release([one, other])
    assert (pool.num_cached, pool.num_free) == (1, 2)
    assert pool.take(b"a") == one


@given(st.integers(2, 12), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_named_or_not_every_block_is_free_cached_or_held_and_names_tell_contents(
    num_blocks: int, actions: list[tuple[int, int]]
) -> None:
    pool = BlockPool(num_blocks)
    holders: list[int] = []
    contents: dict[int, bytes] = {}  # of blocks that were given a name since they were handed out
    for kind, number in actions:
        name = bytes([number])
        if kind == 0 and pool.num_available:
            (block,) = pool.allocate(1)
            assert block not in holders
            holders.append(block)
            contents.pop(block, None)
        elif kind == 1 and holders:
            block = holders[number % len(holders)]
            if block not in contents:
                pool.name(block, name)
                contents[block] = name
                # It, or the one that had the name before.
                found = pool.take(name)
                assert found is not None and contents[found] == name
                pool.release([found])
                if found != block:
                    del contents[block]
        elif kind == 2 and holders:
            pool.release([holders.pop(number % len(holders))])
        elif kind == 3 and (taken := pool.take(name)) is not None:
            assert contents[taken] == name
            holders.append(taken)
        assert pool.num_used == len(set(holders))
        assert pool.num_free + pool.num_cached + pool.num_used == num_blocks - 1
