import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.serving.columns import MalformedColumn, pack, split, unpack


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_what_is_packed_is_unpacked(values: list[int]) -> None:
    data = pack(values, "<u8")
    assert len(data) == 8 * len(values)
    assert unpack("column", data, "<u8", len(values)) == values


def test_numbers_are_little_endian() -> None:
    assert pack([1, -2], "<i4") == b"\x01\0\0\0\xfe\xff\xff\xff"


@pytest.mark.parametrize(("data", "count"), [(b"abc", None), (b"abcd", 2), (b"abcdefgh", 1)])
def test_a_column_of_the_wrong_length_is_named(data: bytes, count: int | None) -> None:
    with pytest.raises(MalformedColumn, match="slots"):
        unpack("slots", data, "<u4", count)


def test_a_ragged_column_is_cut_by_its_counts() -> None:
    assert split("tokens", [1, 2, 3], [2, 0, 1]) == [[1, 2], [], [3]]
    with pytest.raises(MalformedColumn, match="tokens"):
        split("tokens", [1, 2, 3], [2, 2])
