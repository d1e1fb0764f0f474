"""What a draft service does with a target's rows, over a real stream."""

import pytest
from draft_server import run, running
from link_client import Row, connect, drafts_in, hash_of, hello

from outrider.serving.columns import unpack

TEXT = [10, 11, 12, 13] * 4


def test_a_repetitive_sequence_is_continued_and_the_stamps_are_echoed() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((3, TEXT), generation=5)
            draft = await client.step(Row(3, [*TEXT, 10], generation=5))
            assert drafts_in(draft) == {3: [11, 12, 13, 10]}
            assert draft.draft_boot_id == service.lifecycle.boot_id
            assert (draft.target_boot_id, draft.stream_epoch) == (7, 1)
            assert unpack("generations", draft.generations, "<u4") == [5]
            assert unpack("base_lengths", draft.base_lengths, "<u4") == [17]
            assert unpack("prefix_hashes", draft.prefix_hashes, "<u8") == [hash_of([*TEXT, 10])]
            assert draft.build_us > 0
            assert not (draft.parents or draft.case_accepted_lengths)

    run(scenario())


def test_a_step_whose_rows_have_no_draft_is_answered_all_the_same() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, list(range(100, 120))))
            draft = await client.step(Row(0, [*range(100, 120), 300]), Row(9, TEXT))
            assert drafts_in(draft) == {0: [], 9: []}
            assert client.rows_seen("resync") == [(9, 1, 0)]

    run(scenario())


def test_a_step_that_asks_for_nothing_gets_no_answer() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            await client.write(step=client.step_of(Row(0, [*TEXT, 10], draft_length=0)))
            draft = await client.step(Row(0, [*TEXT, 10, 11]))
            assert drafts_in(draft) == {0: [12, 13, 10, 11]}
            assert client.seen == []

    run(scenario())


def test_commits_are_cumulative_and_idempotent() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            first = [*TEXT, 10]
            then = [*first, 11, 12]
            assert drafts_in(await client.step(Row(0, first))) == {0: [11, 12, 13, 10]}
            # The same again, and then commits that overlap with what is held.
            assert drafts_in(await client.step(Row(0, first))) == {0: [11, 12, 13, 10]}
            assert drafts_in(await client.step(Row(0, then, 7))) == {0: [13, 10, 11, 12]}
            assert drafts_in(await client.step(Row(0, then, 0))) == {0: [13, 10, 11, 12]}
            assert client.seen == []

    run(scenario())


def test_a_stale_row_changes_nothing_and_gets_no_draft() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            now = [*TEXT, 10, 11, 12]
            await client.step(Row(0, now, 3))
            for stale in (now[:-1], now[:-3], TEXT[:8]):
                assert drafts_in(await client.step(Row(0, stale))) == {0: []}
            assert service.count_of("stale rows") == 3
            assert client.seen == []
            assert drafts_in(await client.step(Row(0, [*now, 13]))) == {0: [10, 11, 12, 13]}

    run(scenario())


@pytest.mark.parametrize(
    ("row", "held"),
    [
        (Row(0, [*TEXT, 10, 11, 12], 2), 16),  # a token is missing
        (Row(0, [*TEXT[:-1], 99, 10], 1), 16),  # another text
        (Row(0, [*TEXT[:-1], 99], 0), 16),  # another text of the same length
    ],
)
def test_a_gap_or_another_text_asks_for_the_sequence_and_an_open_heals_it(
    row: Row, held: int
) -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            assert drafts_in(await client.step(row)) == {0: []}
            assert client.rows_seen("resync") == [(0, 1, held)]
            await client.open((0, [*TEXT, 10, 11]))
            assert drafts_in(await client.step(Row(0, [*TEXT, 10, 11, 12]))) == {
                0: [13, 10, 11, 12]
            }

    run(scenario())


def test_an_open_whose_hash_is_wrong_is_asked_for_again() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), prefix_hash=4711)
            resync = await client.next("resync")
            assert unpack("slots", resync.slots, "<u4") == [0]
            assert unpack("held_lengths", resync.held_lengths, "<u4") == [0]
            await client.open((0, TEXT))
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}

    run(scenario())


def test_a_long_open_is_checked_and_indexed_in_pieces_before_it_is_drafted_for() -> None:
    async def scenario() -> None:
        text = [index % 97 for index in range(50_000)]
        async with running() as service, connect(service.address) as client:
            await client.open((0, text), (1, TEXT))
            # Other sequences are not kept waiting for it.
            assert drafts_in(await client.step(Row(1, TEXT, 0))) == {1: [10, 11, 12, 13]}
            draft = await client.step(Row(0, text, 0))
            while not drafts_in(draft)[0]:
                draft = await client.step(Row(0, text, 0))
            start = len(text) % 97
            assert drafts_in(draft) == {0: [start, start + 1, start + 2, start + 3]}

    run(scenario())


def test_a_reused_slot_holds_only_its_new_generation() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), generation=1)
            await client.open((0, [20, 21] * 4), generation=2)
            draft = await client.step(Row(0, [*TEXT, 10], generation=1))
            assert drafts_in(draft) == {0: []}
            assert client.rows_seen("resync") == [(0, 1, 0)]
            draft = await client.step(Row(0, [20, 21] * 4, 0, generation=2))
            assert drafts_in(draft) == {0: [20, 21, 20, 21]}
            # A late Close of the old generation does not touch the new one.
            await client.close(0, generation=1)
            draft = await client.step(Row(0, [20, 21] * 4, 0, generation=2))
            assert drafts_in(draft) == {0: [20, 21, 20, 21]}

    run(scenario())


def test_two_targets_use_the_same_slots_without_meeting() -> None:
    async def scenario() -> None:
        async with (
            running() as service,
            connect(service.address, hello(1)) as first,
            connect(service.address, hello(2)) as second,
        ):
            await first.open((0, TEXT))
            await second.open((0, [20, 21] * 4))
            assert drafts_in(await first.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}
            assert drafts_in(await second.step(Row(0, [20, 21] * 4, 0))) == {0: [20, 21, 20, 21]}
            await second.close(0)
            assert drafts_in(await first.step(Row(0, [*TEXT, 10]))) == {0: [11, 12, 13, 10]}

    run(scenario())


def test_messages_of_another_target_or_epoch_are_dropped() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address, hello(7, 3)) as client:
            await client.open((0, TEXT))
            for stamps in ({"target_boot_id": 8}, {"stream_epoch": 2}):
                await client.write(step=client.step_of(Row(0, [*TEXT, 10]), **stamps))
            draft = await client.step(Row(0, TEXT, 0))
            assert drafts_in(draft) == {0: [10, 11, 12, 13]}
            assert client.seen == []
            assert service.count_of("foreign messages") == 2

    run(scenario())
