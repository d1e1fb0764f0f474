"""The EAGLE-3 drafter (arXiv 2503.01840): one decoder layer that reads the target's features.

Its cache holds true features behind the target and its own outputs ahead of it; what was drafted
is run again once the target's features are there. It draws with the target's own noise, by the
target's token ids (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from draft_service.drafters.drafter import NO_PROPOSAL, Proposal, Wish
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from draft_service.drafters.head_drafter import HeadDrafter, HeadLimits
from draft_service.drafters.pace import ANSWER_SECONDS
from draft_service.drafters.probability import probability_of
from outrider.engine.eagle3.head_runner import HeadOutput, HeadRunner
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import sample, sample_among
from outrider.engine.step import SequenceRows

MAX_DRAFT_LENGTH = 32


class Eagle3Drafter(HeadDrafter):
    """Proposes with a head. One forward per draft position, for all rows together."""

    def __init__(
        self,
        *,
        runner: HeadRunner,
        block_pool: BlockPool,
        eos_token_ids: frozenset[int],
        step_seconds: Sequence[tuple[int, float]],
        window: int = 0,
        min_probability: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_seconds`: (rows, seconds of a forward), ascending, as measured at boot.

        `window`: rows that a row attends to at least, in whole blocks; 0 = all. A draft ends
        before a token with which the product of the head's own probabilities falls below
        `min_probability`; 0 = it does not. Tokens that a guide puts in count as certain.
        """
        assert 0 <= min_probability < 1, min_probability
        weights = runner.head.weights
        super().__init__(
            config=runner.head.config,
            weights=weights,
            limits=HeadLimits(
                dtype=runner.dtype,
                block_size=runner.block_size,
                max_sequence_length=runner.max_sequence_length,
                max_step_rows=runner.max_step_rows,
                max_draft_length=MAX_DRAFT_LENGTH,
                step_seconds=step_seconds,
            ),
            block_pool=block_pool,
            window=window,
        )
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._min_probability = min_probability
        self._clock = clock
        self._target_token_ids = weights.target_token_ids

    def _run_rows(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> None:
        self._runner.forward(batch, features)

    def propose(self, wishes: Sequence[Wish[Eagle3Sequence]]) -> list[Proposal]:
        """Draws up to that many tokens for each whose features reach its last token but one.

        A draft ends behind an end token, where one more position would come too late, and where
        the head doubts it. One token is always drawn. The draft goes on from what a guide chose.
        """
        drafts = [_Draft(wish) for wish in wishes]
        live = [draft for draft in drafts if draft.state.is_ready]
        started = self._clock()
        output = self._extend(live) if live else None
        while output is not None:
            rows = [row for row, draft in enumerate(live) if self._draw(draft, output.logits[row])]
            now = self._clock()
            # The next position takes about as long as this one did.
            next_ends = now + (now - started) + ANSWER_SECONDS
            started = now
            rows = [row for row in rows if next_ends <= live[row].finish_by]
            output = self._draft_step(live, rows, output.features) if rows else None
            live = [live[row] for row in rows]
        return [Proposal(draft.token_ids) if draft.token_ids else NO_PROPOSAL for draft in drafts]

    def _extend(self, drafts: Sequence["_Draft"]) -> HeadOutput:
        """The rows of all backlogs, and the logits of each sequence's last."""
        pieces = [
            self._extended(draft.state, draft.state.backlog, num_logits=1) for draft in drafts
        ]
        batch, features = zip(*pieces, strict=True)
        return self._forward(batch, torch.cat(features) if len(features) > 1 else features[0])

    def _draft_step(
        self, live: Sequence["_Draft"], rows: Sequence[int], features: torch.Tensor
    ) -> HeadOutput:
        """One more position for some of the drafts, from the outputs of all."""
        if len(rows) < len(live):
            features = features[rows]
        return self._forward([live[row].next_row() for row in rows], features)

    def _forward(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> HeadOutput:
        """A forward in steps of at most max_step_rows rows."""
        most = self._runner.max_step_rows
        if len(features) <= most:
            return self._runner.forward(batch, features)
        outputs = []
        step: list[SequenceRows] = []
        first = end = 0
        for rows in batch:
            if end + len(rows.token_ids) - first > most:
                outputs.append(self._runner.forward(step, features[first:end]))
                step, first = [], end
            step.append(rows)
            end += len(rows.token_ids)
        outputs.append(self._runner.forward(step, features[first:end]))
        logits, next_features = zip(*outputs, strict=True)
        return HeadOutput(np.concatenate(logits), torch.cat(next_features))

    def _draw(self, draft: "_Draft", logits: npt.NDArray[np.float32]) -> bool:
        """Adds the next token; False where the draft is complete."""
        sampling = draft.state.sampling
        position = draft.state.length + len(draft.token_ids)
        ids = self._target_token_ids
        if ids is None:
            index = token_id = sample(logits, sampling, position)
        else:
            index = sample_among(logits, ids, sampling, position)
            token_id = int(ids[index])
        probability = partial(probability_of, logits, index, sampling)
        own_token_id = token_id
        if draft.guide is not None:
            token_id = draft.guide.choose(draft.token_ids, token_id, probability)
        if self._min_probability and token_id == own_token_id:
            draft.probability *= probability()
            if draft.token_ids and draft.probability < self._min_probability:
                return False
        draft.token_ids.append(token_id)
        return len(draft.token_ids) < draft.draft_length and token_id not in self._eos_token_ids


class _Draft:
    """One draft in the making."""

    __slots__ = ("draft_length", "finish_by", "guide", "probability", "state", "token_ids")

    def __init__(self, wish: Wish[Eagle3Sequence]) -> None:
        self.state, self.draft_length, self.finish_by, self.guide = wish
        self.token_ids: list[int] = []
        self.probability = 1.0  # of the head's tokens together, by the head

    def next_row(self) -> SequenceRows:
        """The row of the last drawn token, at the position before it."""
        position = self.state.length + len(self.token_ids) - 2
        return self.state.draft_row(self.token_ids[-1], position)
