"""The standalone drafter: a small model with the target's tokenizer and its own paged KV cache.

It draws its tokens with the target's own noise at the same absolute positions (Daliri, Musco,
Suresh, arXiv 2408.07978), so a drafter with the target's weights proposes the target's tokens.
"""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from draft_service.drafters.drafter import DrafterOffer, FeatureRows, Proposal, Wish
from draft_service.drafters.pace import ANSWER_SECONDS, MAX_BACKLOG, rows_within
from draft_service.drafters.probability import probability_of
from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool
from outrider.engine.runner import Runner, SequenceRows
from outrider.engine.sampling import Sampling, sample

NAME = "standalone"
MAX_DRAFT_LENGTH = 32


class StandaloneSequence:
    """One sequence: its live tokens, its blocks, and what of it lies in the KV cache."""

    __slots__ = ("block_table", "cached_length", "draft_tail", "sampling", "token_ids")

    def __init__(self, token_ids: "array[int]", sampling: Sampling) -> None:
        self.token_ids = token_ids
        self.sampling = sampling
        self.block_table: list[int] = []
        # Keys and values of so many committed tokens are in the cache,
        self.cached_length = 0
        # and behind them those of these draft tokens.
        self.draft_tail: list[int] = []

    def settle(self) -> None:
        """Keeps of the draft tail what was committed since; the rest will be overwritten."""
        tokens, tail = self.token_ids, self.draft_tail
        kept = 0
        while (
            kept < len(tail)
            and self.cached_length < len(tokens)
            and tokens[self.cached_length] == tail[kept]
        ):
            kept += 1
            self.cached_length += 1
        self.draft_tail = tail[kept:] if self.cached_length == len(tokens) else []

    def rows(self, count: int, num_logits: int) -> SequenceRows:
        """The next `count` committed tokens that are not in the cache."""
        start = self.cached_length
        return SequenceRows(
            token_ids=self.token_ids[start : start + count].tolist(),
            start=start,
            block_table=self.block_table,
            num_logits=num_logits,
        )


class StandaloneDrafter:
    """Proposes with a model of its own. One forward per draft position, for all rows together."""

    max_backlog = MAX_BACKLOG

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
        self._runner = runner
        self._pool = block_pool
        self._eos_token_ids = eos_token_ids
        self._step_seconds = step_seconds
        self._clock = clock
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint=fingerprint,
            max_draft_length=MAX_DRAFT_LENGTH,
            max_sequence_length=runner.max_sequence_length,
            feature_needs=None,
        )

    def open(self, token_ids: "array[int]", sampling: Sampling) -> StandaloneSequence:
        """No forward yet: `prepare` runs the prompt in pieces, while the target runs it too."""
        return StandaloneSequence(token_ids, sampling)

    def add_features(self, state: StandaloneSequence, features: FeatureRows) -> bool:
        """Never called: it needs none."""
        raise AssertionError("the standalone drafter announced no need of features")

    def reserve(self, state: StandaloneSequence, length: int) -> bool:
        """Hands the sequence blocks for `length` tokens; False if the pool has too few."""
        try:
            self._pool.grow(state.block_table, length=length, block_size=self._runner.block_size)
        except CacheFull:
            return False
        return True

    def backlog(self, state: StandaloneSequence) -> int:
        """Committed tokens that are not in the cache."""
        state.settle()
        return len(state.token_ids) - state.cached_length

    def prepare(self, states: Sequence[StandaloneSequence], budget_seconds: float) -> None:
        """One forward of as many rows as the budget allows, of the first sequences first."""
        room = self.rows_within(budget_seconds)
        batch = []
        for state in states:
            count = min(self.backlog(state), room)
            if count:
                batch.append((state, state.rows(count, num_logits=0)))
                room -= count
        if batch:
            self._runner.forward([rows for _, rows in batch])
        for state, rows in batch:
            state.cached_length += len(rows.token_ids)
            state.draft_tail = []

    def rows_within(self, seconds: float) -> int:
        """Rows of a forward of about so many seconds, by what boot measured."""
        return rows_within(seconds, self._step_seconds, self._runner.max_step_rows)

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

    def close(self, state: StandaloneSequence) -> None:
        """Gives the blocks back."""
        self._pool.release(state.block_table)
        state.block_table = []

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
