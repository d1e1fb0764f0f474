"""What drafters with a small model of their own do with sequences: rows are run, blocks are held.
How a draft is made is the subclass's.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from draft_service.drafters.drafter import DrafterOffer, FeatureRows, Proposal, Wish
from draft_service.drafters.pace import MAX_BACKLOG, rows_within
from draft_service.drafters.standalone_sequence import StandaloneSequence
from outrider.engine.errors import CacheFull
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows

NAME = "standalone"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModelLimits:
    """Of a model that has been booted."""

    block_size: int
    max_sequence_length: int
    max_step_rows: int
    max_draft_length: int
    step_seconds: Sequence[tuple[int, float]]  # (rows, seconds of a forward), ascending


class SmallModelDrafter(ABC):
    """A drafter with a model of its own, but for its drafts."""

    def __init__(
        self, *, limits: SmallModelLimits, block_pool: BlockPool, fingerprint: str
    ) -> None:
        self.max_backlog = min(MAX_BACKLOG, limits.max_step_rows)
        self._limits = limits
        self._pool = block_pool
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
        try:
            self._pool.grow(state.block_table, length=length, block_size=self._limits.block_size)
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
            self._run_rows([rows for _, rows in batch])
        for state, rows in batch:
            state.cached_length += len(rows.token_ids)
            state.draft_tail = []

    def rows_within(self, seconds: float) -> int:
        """Rows of a forward of about so many seconds, by what boot measured."""
        return rows_within(seconds, self._limits.step_seconds, self._limits.max_step_rows)

    def close(self, state: StandaloneSequence) -> None:
        """Gives the blocks back."""
        self._pool.release(state.block_table)
        state.block_table = []
