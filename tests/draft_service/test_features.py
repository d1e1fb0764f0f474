"""What a Proposer does with features: to the drafter, into its spare time, or asked for again."""

from collections.abc import Iterator

import pytest
from feature_drafter import (
    ROW_BYTES,
    FeatureDrafter,
    inline_columns,
    rows_of,
    shared_columns,
)
from link_client import Row, drafts_in
from proposer_client import Driver

from draft_service.drafters.drafter import FeatureRows
from outrider.serving.columns import pack
from outrider.serving.shared_ring import SharedRing, random_ring_name
from outrider.v1 import draft_pb2

TEXT = list(range(100, 112))
CAPACITY = draft_pb2.REFUSE_REASON_CAPACITY


@pytest.fixture
def ring() -> Iterator[SharedRing]:
    ring = SharedRing.create(random_ring_name(), 128)
    yield ring
    ring.close()


def given(first_position: int, count: int) -> FeatureRows:
    return FeatureRows(first_position=first_position, rows=rows_of(first_position, count))


def message_of(first_position: int, count: int) -> draft_pb2.Features:
    return draft_pb2.Features(
        first_position=first_position, inline_rows=rows_of(first_position, count), row_count=count
    )


def prompt_row(slot: int = 0, text: list[int] = TEXT) -> Row:
    """A row that brings features of the prompt and nothing else."""
    return Row(slot, text, 0, draft_length=0)


def send(driver: Driver, *rows: Row, **columns: bytes) -> None:
    """A Step that asks for no draft."""
    driver.receive(step=driver.client.step_of(*rows, **columns))
    assert all(answer.WhichOneof("kind") != "draft" for answer in driver.answers())


def test_features_reach_the_drafter_with_their_positions(ring: SharedRing) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    driver.open((0, TEXT), features=message_of(0, 11))
    driver.open((1, TEXT))
    rows = (Row(0, [*TEXT, 1, 2], 2), Row(1, [*TEXT, 1]))
    driver.step(*rows, **inline_columns((11, 2), (0, 12)))
    more = (Row(0, [*TEXT, 1, 2, 3]), Row(1, [*TEXT, 1, 2]))
    driver.step(*more, **shared_columns(ring, (13, 1), (12, 1)))
    assert drafter.given == [given(0, 11), given(11, 2), given(0, 12), given(13, 1), given(12, 1)]
    assert driver.client.rows_seen("resync") == []
    assert driver.counters.words() == ""


def test_an_open_may_have_its_features_in_shared_memory(ring: SharedRing) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    ring.write(b"1234")
    features = draft_pb2.Features(shared_memory_offset=ring.write(rows_of(3, 8)))
    features.first_position, features.row_count = 3, 8
    driver.open((0, TEXT), features=features)
    assert drafter.given == [given(3, 8)]
    assert driver.client.rows_seen("resync") == []


@pytest.mark.parametrize("transport", ["inline", "shared"])
def test_the_prompts_features_are_worked_on_while_the_target_still_prefills(
    transport: str, ring: SharedRing
) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)

    def columns(*features: tuple[int, int]) -> dict[str, bytes]:
        if transport == "inline":
            return inline_columns(*features)
        return shared_columns(ring, *features)

    driver.open((0, TEXT))
    driver.prepare()
    for first, count in ((0, 2), (2, 6), (8, 2), (10, 1)):
        send(driver, prompt_row(), **columns((first, count)))
        assert driver.proposer.has_unprepared
        driver.prepare()
        assert drafter.states[0].worked_length == first + count
    # All but the last position's: those come with the first token.
    draft = driver.step(Row(0, [*TEXT, 1]), **columns((11, 1)))
    assert drafts_in(draft) == {0: [12]}
    assert driver.counters.words() == ""


def test_a_short_backlog_is_worked_on_at_once_only_for_a_prompt() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT), features=message_of(0, 11))
    driver.prepare()
    # A commit that asks for no draft waits until there is more to do in one piece.
    send(driver, Row(0, [*TEXT, 1], draft_length=0), **inline_columns((11, 1)))
    assert not driver.proposer.has_unprepared
    rows = Row(0, [*TEXT, 1, 2, 3], 2, draft_length=0)
    send(driver, rows, **inline_columns((12, 2)))
    assert driver.proposer.has_unprepared
    driver.prepare()
    assert drafter.states[0].worked_length == 14


def test_a_session_that_waits_for_features_is_not_worked_on_over_and_over() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT), (1, TEXT), (2, TEXT))
    send(driver, prompt_row(1), **inline_columns((0, 6)))
    driver.prepare()
    # Six rows are two pieces; a third finds nothing.
    assert drafter.piece_count == 3
    assert [state.worked_length for state in drafter.states] == [0, 6, 0]
    for _ in range(3):
        send(driver, prompt_row(0))
        driver.prepare()
    assert drafter.piece_count <= 6


def test_a_session_whose_features_are_behind_gets_an_empty_draft_and_holds_up_no_other() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT))
    driver.open((1, TEXT), features=message_of(0, 11))
    driver.prepare()
    texts = [*TEXT, 1]
    rows = (Row(0, texts), Row(1, texts))
    assert drafts_in(driver.step(*rows, **inline_columns(None, (11, 1)))) == {0: [], 1: [12]}
    # Also where so little is missing that the drafter is asked.
    driver.open((0, TEXT), features=message_of(0, 10))
    driver.prepare()
    assert drafts_in(driver.step(Row(0, TEXT, 0))) == {0: []}
    assert driver.client.rows_seen("resync") == []
    # What was missing comes, with what is new.
    draft = driver.step(Row(0, texts), **inline_columns((10, 2)))
    assert drafts_in(draft) == {0: [12]}


def test_features_of_duplicate_rows_count_and_those_of_stale_rows_do_not() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT))
    now = [*TEXT, 1, 2]
    driver.step(Row(0, now, 2))
    driver.step(Row(0, now, 2), **inline_columns((0, 13)))
    driver.step(Row(0, now[:-1]), **inline_columns((0, 3)))
    assert drafter.given == [given(0, 13)]
    assert driver.counters.of("stale rows") == 1


@pytest.mark.parametrize(
    ("first_position", "count", "is_taken"),
    [(0, 12, True), (11, 1, True), (0, 13, False), (12, 1, False), (2**32 - 1, 1, False)],
)
def test_features_of_tokens_that_are_not_committed_are_left_out(
    first_position: int, count: int, is_taken: bool, ring: SharedRing
) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    driver.open((0, TEXT), (1, TEXT))
    rows = (Row(0, [*TEXT, 1]), Row(1, [*TEXT, 1]))
    columns = inline_columns((first_position, 0), (0, 12))
    columns["feature_counts"] = pack([count, 12], "<u4")
    columns["inline_features"] = bytes(count * ROW_BYTES) + rows_of(0, 12)
    draft = driver.step(*rows, **columns)
    expected = [FeatureRows(first_position=first_position, rows=bytes(count * ROW_BYTES))]
    assert drafter.given == (expected if is_taken else []) + [given(0, 12)]
    assert driver.counters.of("features out of bounds") == (not is_taken)
    # Its tokens were taken all the same.
    assert drafts_in(draft).keys() == {0, 1}
    assert [len(state.token_ids) for state in drafter.states] == [13, 13]
    assert driver.client.rows_seen("resync") == []


def test_an_opens_features_are_bounded_by_its_tokens() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT), features=message_of(0, 12))
    driver.open((1, TEXT), features=message_of(1, 10))
    assert drafter.given == [given(1, 10)]
    assert driver.counters.of("features out of bounds") == 1
    assert driver.proposer.session_count == 2


def test_a_gap_is_asked_for_again_and_healed_by_a_fresh_open() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT), (1, TEXT))
    send(driver, prompt_row(0), prompt_row(1), **inline_columns((0, 4), (0, 11)))
    texts = [*TEXT, 1]
    draft = driver.step(Row(0, texts), Row(1, texts), **inline_columns((6, 6), (11, 1)))
    assert drafts_in(draft)[0] == []
    assert driver.client.rows_seen("resync") == [(0, 1, 13)]
    assert driver.counters.of("feature gaps") == 1
    # Steps that were on their way say so again; the commits are held all the same.
    driver.step(Row(0, [*texts, 2]), **inline_columns((12, 1)))
    assert driver.client.rows_seen("resync") == [(0, 1, 13), (0, 1, 14)]
    gapped = drafter.states[0]
    driver.open((0, [*texts, 2]))
    assert gapped not in drafter.states
    send(driver, prompt_row(0, [*texts, 2]), **inline_columns((0, 13)))
    driver.prepare()
    draft = driver.step(Row(0, [*texts, 2, 3]), **inline_columns((13, 1)))
    assert drafts_in(draft) == {0: [14]}
    assert len(driver.client.rows_seen("resync")) == 2


def test_features_that_were_overwritten_are_asked_for_again(ring: SharedRing) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    driver.open((0, TEXT), (1, TEXT))
    columns = shared_columns(ring, (0, 6), (0, 11))
    ring.write(bytes(80))
    send(driver, prompt_row(0), prompt_row(1), **columns)
    assert driver.client.rows_seen("resync") == [(0, 1, 12)]
    assert driver.counters.of("lost features") == 1
    assert drafter.given == [given(0, 11)]
    driver.prepare()
    draft = driver.step(Row(1, [*TEXT, 1]), **shared_columns(ring, (11, 1)))
    assert drafts_in(draft) == {1: [12]}


def test_an_open_whose_features_are_lost_is_held_and_asked_for_again(ring: SharedRing) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    lost = draft_pb2.Features(shared_memory_offset=0, row_count=3)
    driver.open((0, TEXT), features=lost)
    driver.answers()
    assert driver.client.rows_seen("resync") == [(0, 1, 12)]
    assert driver.proposer.session_count == 1
    assert drafter.given == []


@pytest.mark.parametrize(
    "features",
    [
        draft_pb2.Features(inline_rows=b"12345678", row_count=1),
        draft_pb2.Features(inline_rows=b"1234567", row_count=2),
        draft_pb2.Features(inline_rows=b"", row_count=2**32 - 1),
        draft_pb2.Features(shared_memory_offset=0, row_count=2**32 - 1),
        draft_pb2.Features(shared_memory_offset=0, row_count=2, inline_rows=b"12345678"),
    ],
)
def test_an_open_with_features_that_do_not_fit_is_held_without_them(
    features: draft_pb2.Features, ring: SharedRing
) -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter, feature_ring=ring)
    driver.open((0, TEXT), features=features)
    driver.answers()
    assert drafter.given == []
    assert driver.counters.of("malformed features") == 1
    assert driver.proposer.session_count == 1
    assert driver.client.rows_seen("resync") == driver.client.rows_seen("refuse") == []


def test_a_step_with_malformed_features_commits_and_is_answered() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    driver.open((0, TEXT), features=message_of(0, 11))
    driver.prepare()
    columns = {**inline_columns((11, 1)), "feature_counts": pack([2**32 - 1], "<u4")}
    assert drafts_in(driver.step(Row(0, [*TEXT, 1]), **columns)) == {0: []}
    assert driver.counters.of("malformed features") == 1
    # The next ones are behind a gap, which the drafter finds.
    driver.step(Row(0, [*TEXT, 1, 2]), **inline_columns((12, 1)))
    assert driver.client.rows_seen("resync") == [(0, 1, 14)]


def test_features_of_rows_that_are_not_open_are_answered_as_those_rows_are() -> None:
    drafter = FeatureDrafter()
    driver = Driver(drafter)
    drafter.reserves = False
    driver.open((0, TEXT), features=message_of(0, 11))
    send(driver, prompt_row(0), prompt_row(5), **inline_columns((0, 5), (0, 5)))
    assert drafter.given == []
    assert driver.client.rows_seen("refuse") == [(0, 1, CAPACITY), (0, 1, CAPACITY)]
    assert driver.client.rows_seen("resync") == [(5, 1, 0)]
