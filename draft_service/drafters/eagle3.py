"""The EAGLE-3 drafter (arXiv 2503.01840): one decoder layer that reads the target's features.

Its cache holds true features behind the target and its own outputs ahead of it; what was drafted
is run again once the target's features are there. It draws with the target's own noise, by the
target's token ids (Daliri, Musco, Suresh, arXiv 2408.07978).
"""

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from draft_service.drafters.drafter import (
    NO_PROPOSAL,
    DrafterOffer,
    FeatureNeeds,
    FeatureRows,
    Proposal,
    Wish,
)
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from draft_service.drafters.pace import ANSWER_SECONDS, MAX_BACKLOG, rows_within
from draft_service.drafters.probability import probability_of
from outrider.engine.eagle3.head_runner import HeadOutput, HeadRunner
from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling, sample, sample_among
from outrider.engine.step import SequenceRows

NAME = "eagle3"
MAX_DRAFT_LENGTH = 32
# Far beyond any hidden state, and small enough for the layer's sums in either dtype.
LARGEST_FEATURE = 1e30


class Eagle3Drafter:
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
        assert window >= 0, window
        assert 0 <= min_probability < 1, min_probability
        weights = runner.head.weights
        self.max_backlog = min(MAX_BACKLOG, runner.max_step_rows)
        self._runner = runner
        self._pool = block_pool
        self._eos_token_ids = eos_token_ids
        self._step_seconds = step_seconds
        self._window = window
        self._min_probability = min_probability
        self._clock = clock
        self._row_dtype = weights.row_dtype
        self._target_token_ids = weights.target_token_ids
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint=weights.fingerprint,
            max_draft_length=MAX_DRAFT_LENGTH,
            max_sequence_length=runner.max_sequence_length,
            feature_needs=feature_needs_of(runner),
        )

    def open(self, token_ids: "array[int]", sampling: Sampling) -> Eagle3Sequence:
        """No row can be run before features come."""
        return Eagle3Sequence(token_ids, sampling)

    def add_features(self, state: Eagle3Sequence, features: FeatureRows) -> bool:
        """Keeps what has not been run. False also for numbers that no hidden state has, since they
        would spoil the cache: the sequence is then opened again.
        """
        rows = self._decoded(features.rows)
        end = features.first_position + len(rows)
        if len(rows) == 0:
            return True
        if end > self.offer.max_sequence_length or not bool(rows.abs().amax() <= LARGEST_FEATURE):
            return False
        if not state.has_features:
            state.begin(features.first_position)
        if features.first_position > state.features_end:
            return False
        if end > state.features_end:
            state.append_features(rows[state.features_end - features.first_position :])
        return True

    def reserve(self, state: Eagle3Sequence, length: int) -> bool:
        """Hands the sequence blocks for the rows of `length` tokens; False if there are too few."""
        num_rows = length - 1 - state.first_position
        try:
            self._pool.grow(state.block_table, length=num_rows, block_size=self._runner.block_size)
        except CacheFull:
            return False
        return True

    def backlog(self, state: Eagle3Sequence) -> int:
        """Rows that can be run: none while features are missing."""
        return state.backlog

    def prepare(self, states: Sequence[Eagle3Sequence], budget_seconds: float) -> None:
        """One forward of as many rows as the budget allows, of the first sequences first."""
        room = self.rows_within(budget_seconds)
        pieces = []
        for state in states:
            count = min(state.backlog, room)
            if count:
                pieces.append(self._extended(state, count, num_logits=0))
                room -= count
        if pieces:
            batch, features = zip(*pieces, strict=True)
            self._runner.forward(batch, torch.cat(features))

    def rows_within(self, seconds: float) -> int:
        """Rows of a forward of about so many seconds, by what boot measured."""
        return rows_within(seconds, self._step_seconds, self._runner.max_step_rows)

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

    def close(self, state: Eagle3Sequence) -> None:
        """Gives the blocks back."""
        self._pool.release(state.block_table)
        state.block_table = []

    def _decoded(self, rows: bytes) -> torch.Tensor:
        """[rows, width] in the dtype of the head."""
        width = self._runner.head.config.hidden_size
        if not rows:
            return torch.empty(0, width)
        # A copy, which torch may call writable, and which keeps no message alive.
        return (
            torch.frombuffer(bytearray(rows), dtype=self._row_dtype)
            .view(-1, width)
            .to(self._runner.dtype)
        )

    def _extended(
        self, state: Eagle3Sequence, count: int, num_logits: int
    ) -> tuple[SequenceRows, torch.Tensor]:
        if self._window:
            self._pool.release(state.drop_behind(self._window, self._runner.block_size))
        return state.extend(count, num_logits)

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


def feature_needs_of(runner: HeadRunner) -> FeatureNeeds:
    """What a head reads of its target."""
    config, weights = runner.head.config, runner.head.weights
    return FeatureNeeds(
        layer_ids=config.feature_layers.inputs,
        width=config.hidden_size,
        dtype=str(weights.row_dtype).removeprefix("torch."),
        projection_sha256=hashlib.sha256(weights.projection).hexdigest(),
        target_hidden_size=config.target_hidden_size,
        projection=weights.projection,
    )
