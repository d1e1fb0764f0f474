"""A Step's feature columns into rows: each row gets its own, or none of any row is looked at."""

from collections.abc import Iterator

import pytest
from feature_drafter import ROW_BYTES, inline_columns, rows_of, shared_columns
from hypothesis import given, settings
from hypothesis import strategies as st
from link_client import Client, Row, hello

from draft_service.codec import DecodedStep, decode_step
from draft_service.drafters.drafter import FeatureRows
from draft_service.feature_columns import NO_FEATURES, SentFeatures
from outrider.serving.columns import pack
from outrider.serving.shared_ring import SharedRing, random_ring_name

TEXT = [10, 11, 12, 13]
LOST = SentFeatures(None, are_lost=True)


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    ring = SharedRing.create(random_ring_name(), 64)
    yield ring
    ring.close()


def decode(
    columns: dict[str, bytes], *, ring: SharedRing | None = None, row_bytes: int = ROW_BYTES
) -> DecodedStep:
    """A Step of two rows with these columns, its tokens as they should be."""
    step = Client(call=None, hello=hello()).step_of(Row(0, TEXT), Row(1, TEXT, 2), **columns)
    decoded = decode_step(step, max_rows=2, feature_row_bytes=row_bytes, feature_ring=ring)
    assert [(row.slot, row.token_ids) for row in decoded.rows] == [(0, [13]), (1, [12, 13])]
    assert decoded.is_aligned
    return decoded


def features_in(decoded: DecodedStep) -> list[SentFeatures]:
    return [row.features for row in decoded.rows]


def sent(first_position: int, count: int) -> SentFeatures:
    rows = FeatureRows(first_position=first_position, rows=rows_of(first_position, count))
    return SentFeatures(rows, are_lost=False)


@pytest.mark.parametrize("each", [((0, 3), (1, 2)), ((5, 1), None), (None, (2, 1)), (None, None)])
def test_each_row_gets_its_own_features(
    each: tuple[tuple[int, int] | None, ...], ring: SharedRing
) -> None:
    expected = [sent(*features) if features else NO_FEATURES for features in each]
    for decoded in (
        decode(inline_columns(*each)),
        decode(inline_columns(*each), ring=ring),
        decode(shared_columns(ring, *each), ring=ring),
    ):
        assert features_in(decoded) == expected
        assert decoded.feature_fault is None


def test_a_step_without_feature_columns_has_no_features_and_no_fault(ring: SharedRing) -> None:
    for decoded in (decode({}), decode({}, ring=ring)):
        assert features_in(decoded) == [NO_FEATURES, NO_FEATURES]
        assert decoded.feature_fault is None


def test_only_the_row_whose_bytes_are_not_in_the_memory_has_lost_them(ring: SharedRing) -> None:
    columns = shared_columns(ring, (0, 2), (1, 2))
    for offset in (16, 60, 2**63, 2**64 - 1):
        decoded = decode({**columns, "shared_memory_offsets": pack([0, offset], "<u8")}, ring=ring)
        assert features_in(decoded) == [sent(0, 2), LOST]
        assert decoded.feature_fault is None
    # The first row's are overwritten, the second's just not.
    ring.write(bytes(56))
    assert features_in(decode(columns, ring=ring)) == [LOST, sent(1, 2)]


def test_an_offset_without_rows_is_not_looked_at(ring: SharedRing) -> None:
    columns = shared_columns(ring, (0, 2), None)
    columns["shared_memory_offsets"] = pack([0, 2**64 - 1], "<u8")
    assert features_in(decode(columns, ring=ring)) == [sent(0, 2), NO_FEATURES]


GIANT = pack([2**32 - 1, 2**32 - 1], "<u4")
INLINE = inline_columns((0, 1), (0, 2))
OFFSETS = pack([0, 4], "<u8")
SHARED = {"shared_memory_offsets": OFFSETS, "inline_features": b""}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"feature_counts": pack([1, 1], "<u4")}, "12 bytes, feature_counts add up to 8"),
        ({"feature_counts": pack([2, 2], "<u4")}, "12 bytes, feature_counts add up to 16"),
        ({"feature_counts": GIANT}, "12 bytes, feature_counts add up to 34359738360"),
        ({"feature_counts": pack([3], "<u4")}, "feature_counts has 4 bytes"),
        ({"feature_counts": b""}, "feature_counts has 0 bytes"),
        ({"feature_counts": b"12345"}, "feature_counts has 5 bytes"),
        ({"feature_first_positions": b""}, "feature_first_positions has 0 bytes"),
        ({"feature_first_positions": pack([0, 0], "<u8")}, "feature_first_positions has 16 bytes"),
        # Numbers of another width than those that were announced.
        ({"inline_features": INLINE["inline_features"] * 2}, "24 bytes, feature_counts add up"),
        ({"inline_features": INLINE["inline_features"][:-1]}, "11 bytes"),
        ({"inline_features": b""}, "0 bytes, feature_counts add up to 12"),
        ({"shared_memory_offsets": OFFSETS}, "12 bytes inline"),
        ({**SHARED, "shared_memory_offsets": b"1234567"}, "shared_memory_offsets has 7 bytes"),
        ({**SHARED, "shared_memory_offsets": pack([0], "<u8")}, "shared_memory_offsets has 8"),
        ({**SHARED, "feature_counts": GIANT}, "34359738360 bytes of a memory of 64"),
        # Each fits, together they are more than the memory can hold.
        ({**SHARED, "feature_counts": pack([16, 1], "<u4")}, "68 bytes of a memory of 64"),
    ],
)
def test_columns_that_do_not_fit_cost_all_features_and_no_tokens(
    changes: dict[str, bytes], words: str, ring: SharedRing
) -> None:
    ring.write(bytes(64))
    decoded = decode({**INLINE, **changes}, ring=ring)
    assert features_in(decoded) == [NO_FEATURES, NO_FEATURES]
    assert words in str(decoded.feature_fault)


def test_offsets_on_a_link_without_shared_memory_are_a_fault() -> None:
    decoded = decode({**INLINE, **SHARED})
    assert features_in(decoded) == [NO_FEATURES, NO_FEATURES]
    assert "this link has none" in str(decoded.feature_fault)


def test_nothing_is_looked_at_for_a_drafter_that_needs_none() -> None:
    decoded = decode({name: b"abc" for name in (*INLINE, *SHARED)}, row_bytes=0)
    assert features_in(decoded) == [NO_FEATURES, NO_FEATURES]
    assert decoded.feature_fault is None


numbers = st.lists(st.integers(0, 20) | st.integers(0, 2**32 - 1), min_size=2, max_size=2)
columns = st.fixed_dictionaries(
    {},
    optional={
        "feature_counts": numbers.map(lambda each: pack(each, "<u4")) | st.binary(max_size=9),
        "feature_first_positions": numbers.map(lambda each: pack(each, "<u4")),
        "shared_memory_offsets": numbers.map(lambda each: pack(each, "<u8"))
        | st.binary(max_size=9),
        "inline_features": st.binary(max_size=90),
    },
)


@settings(max_examples=200, deadline=None)
@given(changes=columns, written=st.integers(0, 100))
def test_random_columns_never_make_more_bytes_than_came(
    changes: dict[str, bytes], written: int
) -> None:
    ring = SharedRing.create(random_ring_name(), 64)
    for _ in range(written):
        ring.write(b"x")
    decoded = decode(changes, ring=ring)
    ring.close()
    size = sum(len(row.features.rows.rows) for row in decoded.rows if row.features.rows)
    assert size <= max(len(changes.get("inline_features", b"")), 64)
