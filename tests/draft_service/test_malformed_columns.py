"""Random bytes in every column never end the stream and never touch another row."""

from draft_server import run, running
from hypothesis import given, settings
from hypothesis import strategies as st
from link_client import Row, connect, drafts_in, hello

from outrider.serving.columns import pack, unpack
from outrider.v1 import draft_pb2

TEXT = [10, 11, 12, 13] * 4
# No random column names it.
LIVE_GENERATION = 0xB0A7C0DE

STEP_COLUMNS = (
    "slots",
    "generations",
    "base_lengths",
    "prefix_hashes",
    "commit_counts",
    "commit_token_ids",
    "draft_lengths",
    "inline_features",
    "shared_memory_offsets",
)

any_bytes = st.binary(max_size=40)
# Of a length that aligns with three rows, so that the rows themselves are looked at.
aligned_bytes = st.sampled_from([3, 12, 24]).flatmap(
    lambda size: st.one_of(
        st.binary(min_size=size, max_size=size),
        st.lists(st.integers(0, 3), min_size=size // 4, max_size=size // 4).map(
            lambda numbers: pack(numbers, "<u4")
        ),
    )
)
columns = st.dictionaries(st.sampled_from(STEP_COLUMNS), st.one_of(any_bytes, aligned_bytes))


@settings(max_examples=100, deadline=None)
@given(changes=columns)
def test_a_step_with_random_columns_disturbs_no_other_row(changes: dict[str, bytes]) -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((3, TEXT), generation=LIVE_GENERATION)
            await client.open((0, TEXT), (1, TEXT), (2, TEXT))
            step = client.step_of(*(Row(slot, [*TEXT, 10]) for slot in range(3)), **changes)
            await client.write(step=step)
            if any(step.draft_lengths):
                assert (await client.next("draft")).step_id == step.step_id
            draft = await client.step(Row(3, [*TEXT, 10], generation=LIVE_GENERATION))
            assert drafts_in(draft) == {3: [11, 12, 13, 10]}
            assert all(slot != 3 for slot, generation, _ in client.rows_seen("resync")
                       if generation == LIVE_GENERATION)  # fmt: skip
            assert service.lifecycle.is_serving

    run(scenario())


@settings(max_examples=50, deadline=None)
@given(
    slot=st.integers(0, 4),
    token_ids=any_bytes,
    prefix_hash=st.integers(0, 2**64 - 1),
    temperature=st.floats(),
    top_k=st.integers(0, 2**32 - 1),
    top_p=st.floats(),
    min_p=st.floats(),
    features=any_bytes,
    close_slots=any_bytes,
    close_generations=any_bytes,
)
def test_an_open_and_a_close_with_random_fields_disturb_no_other_row(
    slot: int,
    token_ids: bytes,
    prefix_hash: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    features: bytes,
    close_slots: bytes,
    close_generations: bytes,
) -> None:
    sequence = draft_pb2.Open(slot=slot, token_ids=token_ids, prefix_hash=prefix_hash)
    sequence.sampling.temperature = temperature
    sequence.sampling.top_k = top_k
    sequence.sampling.top_p = top_p
    sequence.sampling.min_p = min_p
    sequence.features.inline_rows = features

    async def scenario() -> None:
        async with running() as service, connect(service.address) as client:
            await client.open((9, TEXT), generation=LIVE_GENERATION)
            await client.write(
                open=draft_pb2.OpenBatch(**client.stamps(), sequences=[sequence, sequence])
            )
            await client.write(
                close=draft_pb2.CloseBatch(
                    **client.stamps(), slots=close_slots, generations=close_generations
                )
            )
            draft = await client.step(Row(9, TEXT, 0, generation=LIVE_GENERATION))
            assert drafts_in(draft) == {9: [10, 11, 12, 13]}
            assert service.lifecycle.is_serving

    run(scenario())


def test_what_is_drafted_for_a_row_in_garbage_is_never_outside_the_vocabulary() -> None:
    async def scenario() -> None:
        async with running() as service, connect(service.address, hello(vocab_size=20)) as client:
            await client.open((0, TEXT))
            step = client.step_of(Row(0, [*TEXT, 10]))
            step.commit_token_ids = pack([20], "<i4")
            await client.write(step=step)
            draft = await client.next("draft")
            assert unpack("token_ids", draft.token_ids, "<i4") == []

    run(scenario())
