"""Sequences decoded by hand on an engine's steps."""

import numpy as np

from outrider.engine.boot import Engine
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import NextRow, SequenceStep

GREEDY = Sampling(temperature=0.0)


class Stream:
    """One sequence being decoded by hand."""

    def __init__(self, engine: Engine, prompt: list[int], room: int) -> None:
        self.engine = engine
        self.table = engine.block_pool.allocate(-(-(len(prompt) + room) // 32))
        self.token_ids = list(prompt)
        rows = SequenceRows(token_ids=prompt, start=0, block_table=self.table, num_logits=1)
        step = SequenceStep(rows=rows, draft_length=0, sampling=GREEDY, base_length=len(prompt))
        (verdict,) = engine.steps.launch([step], None).verdicts()
        self.token_ids.append(verdict.bonus_token_id)

    def step(self, drafts: list[int], sampling: Sampling = GREEDY) -> SequenceStep:
        return SequenceStep(
            rows=SequenceRows(
                token_ids=(self.token_ids[-1], *drafts),
                start=len(self.token_ids) - 1,
                block_table=self.table,
                num_logits=1 + len(drafts),
            ),
            draft_length=len(drafts),
            sampling=sampling,
            base_length=len(self.token_ids),
        )

    def next_row(self, index: int, sampling: Sampling = GREEDY) -> NextRow:
        """Its row of the step behind one that runs, in which it is the index-th."""
        length = len(self.token_ids)
        return NextRow(
            index=index,
            start=length,
            block_table=self.table,
            sampling=sampling,
            base_length=length + 1,
        )

    def close(self) -> None:
        self.engine.block_pool.release(self.table)


def prompt_of(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 49_152, length).tolist()
