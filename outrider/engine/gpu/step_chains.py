"""Drafts by a whole model on a GPU: the committed rows, then plain steps launched one behind the
other, each taking its tokens from the one before on the device. The host reads them once.
"""

from collections.abc import Sequence

from outrider.engine.gpu.sampling_kernel import NO_TOKEN
from outrider.engine.gpu.step_bounds import StepBounds
from outrider.engine.gpu.step_chain import StepChain
from outrider.engine.gpu.steps import GpuStep, GpuSteps
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import NextRow, SequenceStep


class StepChains:
    """Drafts over an engine's steps. Owned by one thread at a time."""

    def __init__(self, steps: GpuSteps) -> None:
        self._steps = steps

    @property
    def bounds(self) -> StepBounds:
        """What steps are made for, and so drafts."""
        return self._steps.bounds

    def draft(self, chains: Sequence[StepChain]) -> list[list[int]]:
        """The tokens of every draft, `draft_length` each, fewer where the model's logits are not
        finite. Raises StepError for chains beyond the bounds.
        """
        running = self._steps.launch([_first_step(chain) for chain in chains], None)
        launched: list[tuple[list[int], GpuStep]] = [(list(range(len(chains))), running)]
        for count in range(1, max(chain.draft_length for chain in chains)):
            before, running = launched[-1]
            # Those whose draft is whole leave: they have no blocks for more.
            kept = [at for at, index in enumerate(before) if chains[index].draft_length > count]
            rows = [_next_row(chains[before[at]], at, count) for at in kept]
            following = self._steps.launch_next(rows, None, after=running)
            launched.append(([before[at] for at in kept], following))
        drafts: list[list[int]] = [[] for _ in chains]
        for step, (indices, running) in enumerate(launched):
            for index, token_id in zip(indices, running.last_tokens(), strict=True):
                if token_id != NO_TOKEN and len(drafts[index]) == step:
                    drafts[index].append(token_id)
        return drafts

    def extend(self, batch: Sequence[SequenceRows]) -> None:
        """Runs rows whose logits nobody wants. Raises StepError for more rows than a step has."""
        sequences = [
            SequenceStep(rows=rows, draft_length=0, sampling=None, base_length=0) for rows in batch
        ]
        self._steps.launch(sequences, None).verdicts()


def _first_step(chain: StepChain) -> SequenceStep:
    """All rows draw, as a verify step's do, so that it has a graph; the last token is the one."""
    behind_first = len(chain.rows.token_ids) - 1
    return SequenceStep(
        rows=chain.rows,
        draft_length=behind_first,
        sampling=chain.sampling,
        base_length=chain.length - behind_first,
    )


def _next_row(chain: StepChain, index: int, count: int) -> NextRow:
    """The row of a draft's token `count` - 1, which the step before drew at `index`."""
    place = chain.length + count - 1
    return NextRow(
        index=index,
        start=place,
        block_table=chain.rows.block_table,
        sampling=chain.sampling,
        base_length=place + 1,
    )
