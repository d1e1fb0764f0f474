"""What every EAGLE-3 drafter does with its sequences: features come in, rows are run, blocks are
held. How a draft is made is the subclass's.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draft_service.drafters.cached_drafter import CachedDrafter, ModelLimits
from draft_service.drafters.drafter import (
    DrafterOffer,
    FeatureNeeds,
    FeatureRows,
    Proposal,
    Wish,
)
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from outrider.engine.eagle3.head_config import Eagle3Config
from outrider.engine.eagle3.head_weights import HeadWeights
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows

NAME = "eagle3"
# Far beyond any hidden state, and small enough for the layer's sums in either dtype.
LARGEST_FEATURE = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLimits(ModelLimits):
    """Of a head that has been booted."""

    dtype: torch.dtype  # of features, as its rows take them


class HeadDrafter(CachedDrafter, ABC):
    """A drafter with a head, but for its drafts."""

    def __init__(
        self,
        *,
        config: Eagle3Config,
        weights: HeadWeights,
        limits: HeadLimits,
        block_pool: BlockPool,
        window: int,
    ) -> None:
        """`window`: rows that a row attends to at least, in whole blocks; 0 = all."""
        assert window >= 0, window
        super().__init__(limits, block_pool)
        self._dtype = limits.dtype
        self._window = window
        self._width = config.hidden_size
        self._row_dtype = weights.row_dtype
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint=weights.fingerprint,
            max_draft_length=limits.max_draft_length,
            max_sequence_length=limits.max_sequence_length,
            feature_needs=feature_needs_of(config, weights),
        )

    @abstractmethod
    def propose(self, wishes: Sequence[Wish[Eagle3Sequence]]) -> list[Proposal]:
        """As a Drafter's."""

    @abstractmethod
    def _run_rows(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> None:
        """Runs rows with true features, at most max_step_rows, for their keys and values alone."""

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
        return self._grow(state, length - 1 - state.first_position)

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
            self._run_rows(batch, torch.cat(features))

    def _decoded(self, rows: bytes) -> torch.Tensor:
        """[rows, width] in the dtype of the head."""
        if not rows:
            return torch.empty(0, self._width)
        # A copy, which torch may call writable, and which keeps no message alive.
        return (
            torch.frombuffer(bytearray(rows), dtype=self._row_dtype)
            .view(-1, self._width)
            .to(self._dtype)
        )

    def _extended(
        self, state: Eagle3Sequence, count: int, num_logits: int
    ) -> tuple[SequenceRows, torch.Tensor]:
        if self._window:
            self._pool.release(state.drop_behind(self._window, self._limits.block_size))
        return state.extend(count, num_logits)


def feature_needs_of(config: Eagle3Config, weights: HeadWeights) -> FeatureNeeds:
    """What a head reads of its target."""
    return FeatureNeeds(
        layer_ids=config.feature_layers.inputs,
        width=config.hidden_size,
        dtype=str(weights.row_dtype).removeprefix("torch."),
        projection_sha256=hashlib.sha256(weights.projection).hexdigest(),
        target_hidden_size=config.target_hidden_size,
        projection=weights.projection,
    )
