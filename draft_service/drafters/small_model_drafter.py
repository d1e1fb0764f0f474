"""What drafters with a small model of their own do with sequences: rows are run, blocks are held.
How a draft is made is the subclass's.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence

from draft_service.drafters.cached_drafter import CachedDrafter, ModelLimits
from draft_service.drafters.drafter import DrafterOffer, FeatureRows, Proposal, Wish
from draft_service.drafters.standalone_sequence import StandaloneSequence
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows

NAME = "standalone"


class SmallModelDrafter(CachedDrafter, ABC):
    """A drafter with a model of its own, but for its drafts."""

    def __init__(self, *, limits: ModelLimits, block_pool: BlockPool, fingerprint: str) -> None:
        super().__init__(limits, block_pool)
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint=fingerprint,
            max_draft_length=limits.max_draft_length,
            max_sequence_length=limits.max_sequence_length,
            feature_needs=None,
        )

    @abstractmethod
    def propose(self, wishes: Sequence[Wish[StandaloneSequence]]) -> list[Proposal]:
        """As a Drafter's."""

    @abstractmethod
    def _run_rows(self, batch: Sequence[SequenceRows]) -> None:
        """Runs rows, at most max_step_rows, for their keys and values alone."""

    def open(self, token_ids: "array[int]", sampling: Sampling) -> StandaloneSequence:
        """No forward yet: `prepare` runs the prompt in pieces, while the target runs it too."""
        return StandaloneSequence(token_ids, sampling)

    def add_features(self, state: StandaloneSequence, features: FeatureRows) -> bool:
        """Never called: it needs none."""
        raise AssertionError("the standalone drafter announced no need of features")

    def reserve(self, state: StandaloneSequence, length: int) -> bool:
        """Hands the sequence blocks for `length` tokens; False if the pool has too few."""
        return self._grow(state, length)

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
            self._run_rows([rows for _, rows in batch])
        for state, rows in batch:
            state.cached_length += len(rows.token_ids)
            state.draft_tail = []
