"""The standalone drafter on a GPU: a draft is a chain of captured steps, read back once.

The host sees tokens only when the draft is whole, so no guide has a word in it, and nothing ends it
early but an end token.
"""

from collections.abc import Sequence
from typing import Protocol

from draft_service.drafters.cached_drafter import ModelLimits
from draft_service.drafters.drafter import Proposal, Wish
from draft_service.drafters.small_model_drafter import SmallModelDrafter
from draft_service.drafters.standalone_sequence import StandaloneSequence
from draft_service.drafters.whole_draft import proposal_of
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.step_chain import StepChain
from outrider.engine.kv_cache import BlockPool
from outrider.engine.step import SequenceRows


class Chains(Protocol):
    """Whole drafts by a model, as StepChains makes them."""

    @property
    def bounds(self) -> StepBounds: ...

    def draft(self, chains: Sequence[StepChain]) -> list[list[int]]: ...

    def extend(self, batch: Sequence[SequenceRows]) -> None: ...


class StandaloneGraphDrafter(SmallModelDrafter):
    """Proposes with a model whose steps are graphs."""

    def __init__(
        self,
        *,
        chains: Chains,
        block_pool: BlockPool,
        eos_token_ids: frozenset[int],
        fingerprint: str,
        step_seconds: Sequence[tuple[int, float]],
    ) -> None:
        """`step_seconds`: (rows, seconds of a step), ascending, as measured at boot."""
        bounds = chains.bounds
        super().__init__(
            limits=ModelLimits(
                block_size=bounds.block_size,
                max_sequence_length=bounds.max_sequence_length,
                max_step_rows=bounds.max_step_rows,
                max_draft_length=bounds.max_draft_length,
                step_seconds=step_seconds,
            ),
            block_pool=block_pool,
            fingerprint=fingerprint,
        )
        self._chains = chains
        self._eos_token_ids = eos_token_ids

    def propose(self, wishes: Sequence[Wish[StandaloneSequence]]) -> list[Proposal]:
        """A draft as long as wished for each, shorter behind an end token."""
        drafts: list[list[int]] = []
        most = self._most_at_once()
        for first in range(0, len(wishes), most):
            part = wishes[first : first + most]
            for wish in part:
                self._shorten_backlog(wish.state)
            drafts += self._chains.draft([_chain(wish) for wish in part])
        proposals = []
        for wish, draft in zip(wishes, drafts, strict=True):
            # The last token has not been run.
            wish.state.draft_tail = draft[:-1]
            proposals.append(proposal_of(draft, self._eos_token_ids))
        return proposals

    def _run_rows(self, batch: Sequence[SequenceRows]) -> None:
        self._chains.extend(batch)

    def _most_at_once(self) -> int:
        """Sequences whose first rows fit a step, however many each has."""
        bounds = self._chains.bounds
        return max(1, min(bounds.max_sequences, bounds.max_step_rows // self._most_rows_each))

    @property
    def _most_rows_each(self) -> int:
        return self._chains.bounds.max_draft_length + 1

    def _shorten_backlog(self, state: StandaloneSequence) -> None:
        """Runs what a graph has no rows for."""
        while (excess := self.backlog(state) - self._most_rows_each) > 0:
            count = min(excess, self._limits.max_step_rows)
            self._run_rows([state.rows(count, num_logits=0)])
            state.cached_length += count
            state.draft_tail = []


def _chain(wish: Wish[StandaloneSequence]) -> StepChain:
    """The rows that are missing; with none the last one again: its logits are not in the cache."""
    state = wish.state
    state.settle()
    state.draft_tail = []
    state.cached_length = min(state.cached_length, len(state.token_ids) - 1)
    count = len(state.token_ids) - state.cached_length
    rows = state.rows(count, num_logits=count)
    state.cached_length = len(state.token_ids)
    return StepChain(rows=rows, sampling=state.sampling, draft_length=wish.draft_length)
