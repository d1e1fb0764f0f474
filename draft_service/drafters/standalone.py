"""The standalone drafter: a small model with the target's tokenizer and its own paged KV cache.

It draws its tokens with the target's own noise at the same absolute positions (Daliri, Musco,
Suresh, arXiv 2408.07978), so a drafter with the target's weights proposes the target's tokens.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from draft_service.drafters.cached_drafter import ModelLimits
from draft_service.drafters.drafter import Proposal, Wish
from draft_service.drafters.pace import ANSWER_SECONDS
from draft_service.drafters.probability import probability_of
from draft_service.drafters.small_model_drafter import SmallModelDrafter
from draft_service.drafters.standalone_sequence import StandaloneSequence
from outrider.engine.kv_cache import BlockPool
from outrider.engine.runner import Runner, SequenceRows
from outrider.engine.sampling import sample

MAX_DRAFT_LENGTH = 32


class StandaloneDrafter(SmallModelDrafter):
    """Proposes with a model of its own. One forward per draft position, for all rows together."""

    def __init__(
        self,
        *,
        runner: Runner,
        block_pool: BlockPool,
        eos_token_ids: frozenset[int],
        fingerprint: str,
        step_seconds: Sequence[tuple[int, float]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_seconds`: (rows, seconds of a forward), ascending, as measured at boot."""
        super().__init__(
            limits=ModelLimits(
                block_size=runner.block_size,
                max_sequence_length=runner.max_sequence_length,
                max_step_rows=runner.max_step_rows,
                max_draft_length=MAX_DRAFT_LENGTH,
                step_seconds=step_seconds,
            ),
            block_pool=block_pool,
            fingerprint=fingerprint,
        )
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._clock = clock

    def _run_rows(self, batch: Sequence[SequenceRows]) -> None:
        self._runner.forward(batch)

    def propose(self, wishes: Sequence[Wish[StandaloneSequence]]) -> list[Proposal]:
        """Draws up to that many tokens for each.

        A draft ends behind an end token, and where one more position would come too late: a
        short draft in time is worth more than a long one behind it. One token is always drawn.
        The draft goes on from what a guide chose.
        """
        drafts: list[list[int]] = [[] for _ in wishes]
        batch = []
        for index, wish in enumerate(wishes):
            state = wish.state
            state.settle()
            state.draft_tail = []
            # The last token is run again if it is in the cache: its logits are not.
            state.cached_length = min(state.cached_length, len(state.token_ids) - 1)
            count = len(state.token_ids) - state.cached_length
            batch.append((index, state.rows(count, num_logits=1)))
        started = self._clock()
        while batch:
            drawn = []
            for (index, rows), logits in zip(batch, self._forward(batch), strict=True):
                (state, _, _, guide), draft = wishes[index], drafts[index]
                if draft:
                    state.draft_tail.append(draft[-1])
                else:
                    state.cached_length = len(state.token_ids)
                position = rows.start + len(rows.token_ids)
                token_id = sample(logits, state.sampling, position)
                if guide is not None:
                    probability = partial(probability_of, logits, token_id, state.sampling)
                    token_id = guide.choose(draft, token_id, probability)
                draft.append(token_id)
                drawn.append((index, position))
            now = self._clock()
            # The next position takes about as long as this one did.
            next_ends = now + (now - started) + ANSWER_SECONDS
            started = now
            batch = [
                (index, _row_of(drafts[index][-1], position, wishes[index].state))
                for index, position in drawn
                if self._goes_on(drafts[index], wishes[index], next_ends)
            ]
        return [Proposal(draft) for draft in drafts]

    def _goes_on(self, draft: list[int], wish: Wish[StandaloneSequence], next_ends: float) -> bool:
        return (
            len(draft) < wish.draft_length
            and draft[-1] not in self._eos_token_ids
            and next_ends <= wish.finish_by
        )

    def _forward(
        self, batch: Sequence[tuple[int, SequenceRows]]
    ) -> Iterator[npt.NDArray[np.float32]]:
        """The logits of each entry's last row, in steps of at most max_step_rows rows."""
        step: list[SequenceRows] = []
        num_rows = 0
        for _, rows in batch:
            if num_rows + len(rows.token_ids) > self._runner.max_step_rows:
                yield from self._runner.forward(step)
                step, num_rows = [], 0
            step.append(rows)
            num_rows += len(rows.token_ids)
        yield from self._runner.forward(step)


def _row_of(token_id: int, position: int, state: StandaloneSequence) -> SequenceRows:
    return SequenceRows(
        token_ids=[token_id], start=position, block_table=state.block_table, num_logits=1
    )
