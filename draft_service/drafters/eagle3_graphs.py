"""The EAGLE-3 drafter on a GPU: all positions of a draft are one captured graph.

The host sees tokens only when the draft is whole, so no guide has a word in it, and nothing ends it
early but an end token.
"""

from collections.abc import Sequence

import torch

from draft_service.drafters.drafter import Proposal, Wish
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from draft_service.drafters.head_drafter import HeadDrafter, HeadLimits
from draft_service.drafters.whole_draft import proposal_of
from outrider.engine.gpu.chain_inputs import Chain
from outrider.engine.gpu.head_chains import HeadChains
from outrider.engine.kv_cache import BlockPool
from outrider.engine.step import SequenceRows


class Eagle3GraphDrafter(HeadDrafter):
    """Proposes with a head whose drafts are graphs."""

    def __init__(
        self,
        *,
        chains: HeadChains,
        block_pool: BlockPool,
        eos_token_ids: frozenset[int],
        step_seconds: Sequence[tuple[int, float]],
        window: int = 0,
    ) -> None:
        bounds, head = chains.bounds, chains.head
        super().__init__(
            config=head.config,
            weights=head.weights,
            limits=HeadLimits(
                dtype=head.cache.dtype,
                block_size=bounds.block_size,
                max_sequence_length=bounds.max_sequence_length,
                max_step_rows=bounds.max_step_rows,
                max_draft_length=bounds.max_draft_length,
                step_seconds=step_seconds,
            ),
            block_pool=block_pool,
            window=window,
        )
        self._chains = chains
        self._eos_token_ids = eos_token_ids

    def propose(self, wishes: Sequence[Wish[Eagle3Sequence]]) -> list[Proposal]:
        """A draft as long as wished for each whose features reach its last token but one, shorter
        behind an end token.
        """
        drafts: dict[int, list[int]] = {}
        ready = [index for index, wish in enumerate(wishes) if wish.state.is_ready]
        most = self._chains.bounds.max_sequences
        for first in range(0, len(ready), most):
            part = ready[first : first + most]
            self._shorten_backlogs([wishes[index].state for index in part])
            found = self._chains.draft([self._chain(wishes[index]) for index in part])
            drafts.update(zip(part, found, strict=True))
        return [
            proposal_of(drafts.get(index, []), self._eos_token_ids) for index in range(len(wishes))
        ]

    def _run_rows(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> None:
        self._chains.extend(batch, features)

    def _shorten_backlogs(self, states: Sequence[Eagle3Sequence]) -> None:
        """Runs what a graph has no rows for."""
        rows_each = self._chains.bounds.rows_each
        room = self._limits.max_step_rows
        pieces: list[tuple[SequenceRows, torch.Tensor]] = []
        for state in states:
            excess = state.backlog - rows_each
            if excess <= 0:
                continue
            if excess > room:
                self._run_pieces(pieces)
                pieces, room = [], self._limits.max_step_rows
            pieces.append(self._extended(state, excess, num_logits=0))
            room -= excess
        self._run_pieces(pieces)

    def _run_pieces(self, pieces: Sequence[tuple[SequenceRows, torch.Tensor]]) -> None:
        if pieces:
            batch, features = zip(*pieces, strict=True)
            self._run_rows(batch, torch.cat(features))

    def _chain(self, wish: Wish[Eagle3Sequence]) -> Chain:
        state = wish.state
        rows, features = self._extended(state, state.backlog, num_logits=1)
        return Chain(
            rows=rows,
            features=features,
            sampling=state.sampling,
            first_position=state.length,
            draft_length=wish.draft_length,
        )
