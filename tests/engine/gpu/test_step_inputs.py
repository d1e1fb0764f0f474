"""What a GPU step is given, against the same written down row by row."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from outrider.engine.gpu.step_inputs import (
    HostInputs,
    StepInputs,
    StepShape,
    fill,
    ragged_shape,
    rectangle_shape,
)
from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import SequenceStep

BLOCK_SIZE = 8
MAX_PAGES = 12
MAX_POSITION = 90


def random_step(number: random.Random, *, draft_length: int, chunk: int = 0) -> SequenceStep:
    """A decode or verify step, or a piece of a prompt of `chunk` tokens."""
    count = chunk or 1 + draft_length
    start = number.randrange(60)
    is_last = number.random() < 0.5
    blocks = -(-(start + count) // BLOCK_SIZE) + number.randrange(2)
    sampling = Sampling(temperature=number.choice([0.0, 0.7]), seed=number.getrandbits(64))
    return SequenceStep(
        rows=SequenceRows(
            token_ids=[number.randrange(1, 100) for _ in range(count)],
            start=start,
            block_table=number.sample(range(1, 500), blocks),
            num_logits=(int(is_last) if chunk else count),
        ),
        draft_length=0 if chunk else draft_length,
        sampling=None if chunk and not is_last else sampling,
        base_length=start + count - draft_length,
    )


def filled_host(shape: StepShape, sequences: Sequence[SequenceStep]) -> HostInputs:
    # What an earlier step left must not show through.
    buffer = torch.full((shape.size + 1,), 12345, dtype=torch.int32)
    host = HostInputs(shape, buffer)
    filled = fill(host, sequences, block_size=BLOCK_SIZE, max_position=MAX_POSITION)
    assert filled.num_pages == host.page_starts[-1] <= shape.num_pages
    device = StepInputs(shape, buffer)
    for name in shape.fields():
        seen = getattr(device, name).numpy()
        np.testing.assert_array_equal(seen, getattr(host, name).reshape(-1), err_msg=name)
    return host


def check_own_rows(host: HostInputs, sequences: Sequence[SequenceStep]) -> None:
    """Everything about the rows that are no padding."""
    for index, sequence in enumerate(sequences):
        rows = sequence.rows
        first = int(host.query_starts[index])
        table = rows.block_table
        pages = host.pages[host.page_starts[index] : host.page_starts[index + 1]]
        held = min(len(pages), len(table))
        assert pages[:held].tolist() == list(table[:held])
        assert set(pages[held:].tolist()) <= {PADDING_BLOCK}
        for offset, token_id in enumerate(rows.token_ids):
            place = rows.start + offset
            assert host.token_ids[first + offset] == token_id
            assert host.positions[first + offset] == place
            slot = table[place // BLOCK_SIZE] * BLOCK_SIZE + place % BLOCK_SIZE
            assert host.slots[first + offset] == slot
        planned = int(host.query_starts[index + 1]) - first
        length = (len(pages) - 1) * BLOCK_SIZE + int(host.last_page_lengths[index])
        assert length == rows.start + planned
        if sequence.sampling is None:
            continue
        wanted_rows = [
            first + len(rows.token_ids) - rows.num_logits + step for step in range(rows.num_logits)
        ]
        assert host.logit_rows[index, : rows.num_logits].tolist() == wanted_rows
        positions = host.draw_positions[index, : rows.num_logits].tolist()
        assert positions == [sequence.base_length + step for step in range(rows.num_logits)]
        assert host.draft_lengths[index] == sequence.draft_length
        drafts = host.draft_token_ids[index, : sequence.draft_length].tolist()
        assert drafts == list(rows.token_ids[len(rows.token_ids) - sequence.draft_length :])
        sampling = sequence.sampling
        assert (host.temperatures[index] == sampling.temperature).all()
        if not sampling.is_greedy:
            assert (host.seeds[index].view(np.uint64) == sampling.seed).all()


@pytest.mark.parametrize("seed", range(12))
def test_a_rectangle_holds_its_sequences_and_padding_that_harms_nobody(seed: int) -> None:
    number = random.Random(seed)
    count, rows_each = number.choice([(1, 1), (4, 3), (8, 1), (8, 6)])
    sequences = [
        random_step(number, draft_length=number.randrange(rows_each))
        for _ in range(number.randrange(1, count + 1))
    ]
    host = filled_host(rectangle_shape(count, rows_each, MAX_PAGES), sequences)
    check_own_rows(host, sequences)
    assert host.query_starts.tolist() == [index * rows_each for index in range(count + 1)]
    own = {
        int(host.query_starts[index]) + offset
        for index, sequence in enumerate(sequences)
        for offset in range(len(sequence.rows.token_ids))
    }
    for row in set(range(count * rows_each)) - own:
        assert host.slots[row] // BLOCK_SIZE == PADDING_BLOCK
        assert 0 <= host.positions[row] <= MAX_POSITION
        assert host.token_ids[row] == 0
    # Sequences that are not there draw greedily and accept nothing.
    assert (host.draft_lengths[len(sequences) :] == 0).all()
    assert (host.temperatures[len(sequences) :] == 0).all()


@pytest.mark.parametrize("seed", range(12))
def test_a_ragged_step_holds_chunks_and_drafts_side_by_side(seed: int) -> None:
    number = random.Random(seed)
    sequences = [
        random_step(number, draft_length=number.randrange(4)) for _ in range(number.randrange(4))
    ] + [
        random_step(number, draft_length=0, chunk=number.randrange(1, 30))
        for _ in range(number.randrange(1, 4))
    ]
    host = filled_host(ragged_shape(sequences, MAX_PAGES), sequences)
    check_own_rows(host, sequences)
    assert host.query_starts[-1] == sum(len(one.rows.token_ids) for one in sequences)
    assert (host.logit_rows >= 0).all() and (host.logit_rows < host.query_starts[-1]).all()
