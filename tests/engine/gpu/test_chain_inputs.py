"""What a draft by a head is given on a GPU, against the same written down row by row."""

import random

import numpy as np
import pytest
import torch

from outrider.engine.gpu.chain_inputs import Chain, ChainBounds, ChainInputs, fill
from outrider.engine.kv_cache import PADDING_BLOCK
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows

BOUNDS = ChainBounds(
    block_size=8, max_sequence_length=200, max_step_rows=64, max_sequences=5, max_draft_length=4
)


def random_chain(number: random.Random) -> Chain:
    count = number.randrange(1, BOUNDS.rows_each + 1)
    start = number.randrange(90)
    length = start + count + BOUNDS.max_draft_length
    return Chain(
        rows=SequenceRows(
            token_ids=[number.randrange(1, 100) for _ in range(count)],
            start=start,
            block_table=number.sample(range(1, 500), -(-length // BOUNDS.block_size)),
            num_logits=1,
            position_offset=number.choice([0, 37]),
        ),
        features=torch.zeros(count, 4),
        sampling=Sampling(temperature=number.choice([0.0, 0.7]), seed=number.getrandbits(64)),
        first_position=number.randrange(100),
        draft_length=BOUNDS.max_draft_length,
    )


@pytest.mark.parametrize("seed", range(12))
def test_true_rows_are_right_aligned_and_draft_rows_follow_them(seed: int) -> None:
    number = random.Random(seed)
    count = number.randrange(1, BOUNDS.max_sequences + 1)
    chains = [random_chain(number) for _ in range(number.randrange(count + 1))]
    buffer = torch.full((ChainInputs.size(BOUNDS),), 12345, dtype=torch.int32)
    inputs = ChainInputs(BOUNDS, count, buffer)
    num_pages = fill(inputs, BOUNDS, chains)
    size, each = BOUNDS.block_size, BOUNDS.rows_each
    pages = inputs.pages.numpy()[:num_pages]
    for index, chain in enumerate(chains):
        rows = chain.rows
        own = len(rows.token_ids)
        first_page = int(inputs.page_starts[index])

        slots = [block * size + offset for block in rows.block_table for offset in range(size)]
        for offset in range(each - own):
            row = index * each + offset
            assert int(inputs.slots[row]) // size == PADDING_BLOCK
            assert int(inputs.lengths[row]) == 1
        for offset, token_id in enumerate(rows.token_ids):
            row = (index + 1) * each - own + offset
            place = rows.start + offset
            assert int(inputs.token_ids[row]) == token_id
            assert int(inputs.positions[row]) == place + rows.position_offset
            assert int(inputs.slots[row]) == slots[place]
            assert int(inputs.lengths[row]) == place + 1
            assert int(inputs.row_page_starts[row]) == first_page
        for step in range(BOUNDS.max_draft_length):
            place = rows.start + own + step
            assert int(inputs.draw_positions[step, index]) == chain.first_position + step
            # The last token drawn needs no row.
            if step + 1 < BOUNDS.max_draft_length:
                assert int(inputs.step_positions[step, index]) == place + rows.position_offset
                assert int(inputs.step_slots[step, index]) == slots[place]
                assert int(inputs.step_lengths[step, index]) == place + 1
                assert pages[first_page + place // size] == rows.block_table[place // size]
        sampling = chain.sampling
        assert float(inputs.temperatures[index]) == sampling.temperature
        if not sampling.is_greedy:
            assert inputs.seeds.numpy()[index : index + 1].view(np.uint64)[0] == sampling.seed
    for index in range(len(chains), count):
        for offset in range(each):
            assert int(inputs.slots[index * each + offset]) // size == PADDING_BLOCK
        assert (inputs.step_slots[:, index] // size == PADDING_BLOCK).all()
        assert float(inputs.temperatures[index]) == 0
