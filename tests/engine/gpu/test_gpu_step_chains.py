"""Drafts by a whole model are what the same model draws step by step."""

from typing import Any

import pytest

from outrider.engine.boot import Engine
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from tests.engine.gpu.gpu_streams import GREEDY, Stream, prompt_of

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.8, seed=2**63 + 5),
    Sampling(temperature=1.0, seed=7, top_k=20, top_p=0.9, min_p=0.02),
]
DRAFT_LENGTHS = (5, 1, 4)


def opened(engine: Engine) -> list[Stream]:
    return [Stream(engine, prompt_of(40 + 30 * seed, seed), 64) for seed in range(3)]


def drawn_one_by_one(engine: Engine, stream: Stream, sampling: Sampling, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        (verdict,) = engine.steps.launch([stream.step([], sampling)], None).verdicts()
        stream.token_ids.append(verdict.bonus_token_id)
        tokens.append(verdict.bonus_token_id)
    return tokens


def chain_of(stream: Stream, missing: int, sampling: Sampling, draft_length: int) -> Any:
    from outrider.engine.gpu.step_chain import StepChain

    start = len(stream.token_ids) - missing
    return StepChain(
        rows=SequenceRows(
            token_ids=stream.token_ids[start:],
            start=start,
            block_table=stream.table,
            num_logits=missing,
        ),
        sampling=sampling,
        draft_length=draft_length,
    )


@pytest.mark.parametrize("missing", [1, 2, 4])
def test_chains_of_several_lengths_are_drawn_side_by_side(engine: Engine, missing: int) -> None:
    """With rows to catch up on, as after a draft that was accepted; up to 4 rows of 3 query heads
    each (5 were seen not to be) the kernels are those of single rows.
    """
    from outrider.engine.gpu.step_chains import StepChains
    from outrider.engine.gpu.steps import GpuSteps

    assert isinstance(engine.steps, GpuSteps)
    chains = StepChains(engine.steps)
    expected, asked = [], []
    streams = [*opened(engine), *opened(engine)]
    alone, together = streams[:3], streams[3:]
    for index, sampling in enumerate(SAMPLINGS):
        # What is missing came last; the first such token came with the prompt.
        drawn_one_by_one(engine, alone[index], sampling, missing - 1)
        together[index].token_ids[:] = alone[index].token_ids
        expected.append(drawn_one_by_one(engine, alone[index], sampling, DRAFT_LENGTHS[index]))
        asked.append(chain_of(together[index], missing, sampling, DRAFT_LENGTHS[index]))
    assert chains.draft(asked) == expected
    assert chains.draft(asked) == expected  # the cache holds the same rows again
    assert chains.draft(asked[:1]) == expected[:1]
    for stream in streams:
        stream.close()


def test_rows_run_without_logits_are_there_for_the_draft(engine: Engine) -> None:
    from outrider.engine.gpu.step_chains import StepChains
    from outrider.engine.gpu.steps import GpuSteps

    assert isinstance(engine.steps, GpuSteps)
    chains = StepChains(engine.steps)
    one, other = Stream(engine, prompt_of(90, 4), 16), Stream(engine, prompt_of(90, 5), 16)
    expected = drawn_one_by_one(engine, one, GREEDY, 4)
    tokens = one.token_ids[:-4]
    chains.extend(
        [SequenceRows(token_ids=tokens[:-1], start=0, block_table=other.table, num_logits=0)]
    )
    other.token_ids[:] = tokens
    assert chains.draft([chain_of(other, 1, GREEDY, 4)]) == [expected]
    one.close()
    other.close()
