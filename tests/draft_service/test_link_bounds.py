"""What a draft service refuses, drops and forgets, row by row and stream by stream."""

import pytest
from draft_server import run, running, until
from link_client import VOCAB_SIZE, Row, connect, drafts_in, hello, open_of

from outrider.serving.columns import pack, unpack
from outrider.v1 import draft_pb2, sampling_pb2

LOOP = [10, 11, 12, 13]
TEXT = LOOP * 4
INVALID = draft_pb2.REFUSE_REASON_INVALID
CAPACITY = draft_pb2.REFUSE_REASON_CAPACITY
TOO_LONG = draft_pb2.REFUSE_REASON_TOO_LONG


def test_tokens_outside_the_vocabulary_are_refused_until_the_row_is_opened_again() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), (1, TEXT))
            for bad in (-1, VOCAB_SIZE, 2**31 - 1):
                await client.open((0, TEXT))
                step = client.step_of(Row(0, [*TEXT, 10]), Row(1, TEXT, 0))
                step.commit_token_ids = pack([bad], "<i4")
                await client.write(step=step)
                assert drafts_in(await client.next("draft")) == {0: [], 1: [10, 11, 12, 13]}
            assert client.rows_seen("refuse") == [(0, 1, INVALID)] * 3
            # It is refused again, not asked for: that would be a storm.
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: []}
            assert client.rows_seen("refuse") == [(0, 1, INVALID)] * 4
            assert client.rows_seen("resync") == []

    run(scenario())


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": pack([1, VOCAB_SIZE], "<i4")},
        {"token_ids": pack([-1], "<i4")},
        {"token_ids": b"abc"},
        {"token_ids": b""},
        {"sampling": sampling_pb2.SamplingParameters(temperature=float("nan"))},
        {"sampling": sampling_pb2.SamplingParameters(top_p=2)},
    ],
)
def test_an_open_with_a_field_out_of_its_bounds_is_refused_alone(changes: dict) -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.write(
                open=draft_pb2.OpenBatch(
                    **client.stamps(), sequences=[open_of(0, TEXT, **changes), open_of(1, TEXT)]
                )
            )
            draft = await client.step(Row(1, TEXT, 0))
            assert drafts_in(draft) == {1: [10, 11, 12, 13]}
            assert client.rows_seen("refuse") == [(0, 1, INVALID)]

    run(scenario())


def test_penalties_do_not_keep_a_sequence_from_drafts() -> None:
    async def scenario() -> None:
        sampling = sampling_pb2.SamplingParameters(
            temperature=0.0, frequency_penalty=1.0, seed=2**64 - 1
        )
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), sampling=sampling)
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}

    run(scenario())


def test_a_draft_length_above_what_hello_announced_spoils_its_row_alone() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), (1, TEXT))
            draft = await client.step(
                Row(0, [*TEXT, 10], draft_length=255), Row(1, TEXT, 0, draft_length=8)
            )
            assert drafts_in(draft) == {0: [], 1: LOOP * 2}
            assert service.count_of("draft lengths out of bounds") == 1
            # The commit held.
            assert drafts_in(await client.step(Row(0, [*TEXT, 10, 11]))) == {0: [12, 13, 10, 11]}

    run(scenario())


def test_counts_that_lie_spoil_only_the_rows_whose_tokens_they_take() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT), (1, TEXT), (2, TEXT))
            step = client.step_of(*(Row(slot, [*TEXT, 10]) for slot in range(3)))
            step.commit_counts = pack([1, 2**32 - 1, 1], "<u4")
            await client.write(step=step)
            assert drafts_in(await client.next("draft")) == {0: [11, 12, 13, 10], 1: [], 2: []}
            assert client.rows_seen("resync") == [(1, 1, 16), (2, 1, 16)]
            draft = await client.step(*(Row(slot, [*TEXT, 10, 11], 2) for slot in range(3)))
            assert drafts_in(draft) == {slot: [12, 13, 10, 11] for slot in range(3)}

    run(scenario())


@pytest.mark.parametrize(
    "column", ["slots", "generations", "base_lengths", "prefix_hashes", "commit_counts"]
)
@pytest.mark.parametrize("data", [b"", b"\0", b"\0" * 64])
def test_a_step_whose_columns_do_not_align_is_dropped_and_the_stream_goes_on(
    column: str, data: bytes
) -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            draft = await client.step(Row(0, [*TEXT, 10]), **{column: data})
            assert draft.slots == b""
            assert service.count_of("malformed messages") == 1
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: [10, 11, 12, 13]}

    run(scenario())


def test_one_sequence_twice_in_a_step_gets_one_draft() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((0, TEXT))
            draft = await client.step(Row(0, [*TEXT, 10]), Row(0, [*TEXT, 10, 11]))
            assert unpack("token_counts", draft.token_counts, "<u1") == [0, 4]

    run(scenario())


def test_a_step_that_is_past_its_deadline_is_answered_empty() -> None:
    async def scenario() -> None:
        async with running(inject_fault="draft:propose:delay=0.6") as service:
            async with connect(service.address) as client:
                await client.open((0, TEXT))
                texts = ([*TEXT, 10], [*TEXT, 10, 11])
                for text in texts:
                    await client.write(step=client.step_of(Row(0, text), deadline_us=400_000))
                    # Both must not be taken in one turn.
                    await client.ping()
                drafts = [drafts_in(await client.next("draft")) for _ in texts]
                assert drafts == [{0: [11, 12, 13, 10]}, {0: []}]
                assert service.count_of("late steps") == 1

    run(scenario())


def test_capacity_is_refused_per_row_and_comes_back_with_a_close() -> None:
    async def scenario() -> None:
        async with running(max_sequences=2) as service, connect(service.address) as client:
            await client.open((0, TEXT), (1, TEXT), (2, TEXT))
            draft = await client.step(*(Row(slot, TEXT, 0) for slot in range(3)))
            assert drafts_in(draft) == {0: LOOP, 1: LOOP, 2: []}
            assert client.rows_seen("refuse") == [(2, 1, CAPACITY)] * 2
            await client.close(0)
            await client.open((2, TEXT))
            assert drafts_in(await client.step(Row(2, TEXT, 0))) == {2: LOOP}

    run(scenario())


def test_a_sequence_beyond_the_longest_is_refused() -> None:
    async def scenario() -> None:
        async with running() as service:
            bound = service.drafter.offer.max_sequence_length
            text = [index % 50 for index in range(bound)]
            async with connect(service.address) as client:
                await client.open((0, text), (1, [*text, 0]), (2, TEXT))
                draft = await client.step(Row(2, TEXT, 0))
                assert client.rows_seen("refuse") == [(1, 1, TOO_LONG)]
                step = client.step_of(Row(0, text, 0))
                step.base_lengths = pack([bound + 1], "<u4")
                await client.write(step=step)
                draft = await client.next("draft")
                assert drafts_in(draft) == {0: []}
                assert client.rows_seen("refuse") == [(1, 1, TOO_LONG), (0, 1, TOO_LONG)]

    run(scenario())


def test_a_stream_that_ends_takes_its_sequences_with_it() -> None:
    async def scenario() -> None:
        async with running(max_sequences=1) as service:
            async with connect(service.address, hello(7, 1)) as client:
                await client.open((0, TEXT))
                assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: LOOP}
            async with connect(service.address, hello(7, 2)) as client:
                await client.step(Row(0, [*TEXT, 10]))
                assert client.rows_seen("resync") == [(0, 1, 0)]
                await client.open((0, TEXT))
                assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: LOOP}

    run(scenario())


def test_a_new_epoch_ends_the_older_stream_of_its_target() -> None:
    async def scenario() -> None:
        async with running(max_sequences=1) as service:
            async with connect(service.address, hello(7, 1)) as older:
                await older.open((0, TEXT))
                await older.step(Row(0, TEXT, 0))
                async with connect(service.address, hello(7, 2)) as newer:
                    assert (await older.call.code()).name == "UNAVAILABLE"
                    await until(lambda: older.call.done())
                    await newer.open((0, TEXT))
                    assert drafts_in(await newer.step(Row(0, TEXT, 0))) == {0: LOOP}

    run(scenario())


def test_a_step_with_more_rows_than_hello_announced_is_dropped() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address, hello(max_sequences=2)) as client:
            await client.open((0, TEXT))
            draft = await client.step(*(Row(slot, TEXT, 0) for slot in range(3)))
            assert draft.slots == b""
            assert service.count_of("malformed messages") == 1
            assert drafts_in(await client.step(Row(0, TEXT, 0))) == {0: LOOP}

    run(scenario())
