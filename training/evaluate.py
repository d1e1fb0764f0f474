"""How many draft tokens a target that wrote these rows would have accepted from a head.

A draft's tokens are those of the row up to its first mistake, and what follows a mistake does not
count. So one pass over the true tokens gives the exact accepted length of a draft from every
position (`loss.py`), and a walk over each row visits the positions that a run would draft from.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch

from training.batches import Batch, BatchRows
from training.head import CastHead, Rotation
from training.loss import Kernels, TargetRows, Vocabulary, unrolled_steps


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of a whole walk at one draft length."""

    draft_length: int
    drafts: int
    accepted: int
    accepted_at: tuple[int, ...]  # drafts whose first k + 1 tokens were all accepted, by k

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per verify step, the target's own included."""
        return 1.0 + self.accepted / max(1, self.drafts)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share of the drafts accepted up to and including each position."""
        return tuple(count / max(1, self.drafts) for count in self.accepted_at)

    def record(self) -> dict[str, object]:
        return {
            **asdict(self),
            "acceptance_length": round(self.acceptance_length, 4),
            "per_position": [round(share, 4) for share in self.per_position],
        }


@torch.no_grad()
def accepted_lengths(
    head: CastHead,
    batch: Batch,
    target: TargetRows,
    vocabulary: Vocabulary,
    rotation: Rotation,
    kernels: Kernels,
    draft_length: int,
) -> npt.NDArray[np.int64]:
    """[chains]: how many tokens of a greedy draft of `draft_length` equal the row's own."""
    alive = torch.ones(len(batch.chains), device=batch.tokens.device)
    accepted = torch.zeros_like(alive)
    for outcome in unrolled_steps(head, batch, target, vocabulary, rotation, kernels, draft_length):
        alive = alive * outcome.is_correct
        accepted = accepted + alive
    return accepted.long().cpu().numpy()


def walk(
    chains: npt.NDArray[np.int64],
    chain_lengths: npt.NDArray[np.int64],
    accepted: npt.NDArray[np.int64],
    draft_length: int,
) -> Acceptance:
    """Follow every row of a batch from its answer's start, as drafting and verifying would.

    The first answer token comes with the prompt, so the first draft starts one position further:
    with n committed tokens it is chain n - 2. `accepted` may be for a longer draft.
    """
    drafts = 0
    accepted_at = np.zeros(draft_length, dtype=np.int64)
    at = 0
    while at < len(chains):
        row_end = at + int(chain_lengths[at])
        at += 1
        while at < row_end:
            length = min(int(accepted[at]), draft_length)
            drafts += 1
            accepted_at[:length] += 1
            at += length + 1
        at = row_end
    return Acceptance(
        draft_length, drafts, int(accepted_at.sum()), tuple(int(count) for count in accepted_at)
    )


def add(first: Acceptance, second: Acceptance) -> Acceptance:
    """The counts of two walks at the same draft length together."""
    assert first.draft_length == second.draft_length
    return Acceptance(
        first.draft_length,
        first.drafts + second.drafts,
        first.accepted + second.accepted,
        tuple(a + b for a, b in zip(first.accepted_at, second.accepted_at, strict=True)),
    )


def evaluate(
    head: CastHead,
    batches: Iterable[tuple[BatchRows, Batch]],
    run_target: Callable[[BatchRows, Batch], TargetRows],
    vocabulary: Vocabulary,
    rotation: Rotation,
    kernels: Kernels,
    draft_lengths: Sequence[int],
) -> list[Acceptance]:
    """Acceptance over all rows, at each draft length (greedy drafts)."""
    totals = [Acceptance(length, 0, 0, (0,) * length) for length in draft_lengths]
    for planned, batch in batches:
        if len(batch.chains) == 0:
            continue
        accepted = accepted_lengths(
            head,
            batch,
            run_target(planned, batch),
            vocabulary,
            rotation,
            kernels,
            max(draft_lengths),
        )
        chains, lengths = batch.chains.cpu().numpy(), batch.chain_lengths.cpu().numpy()
        for index, length in enumerate(draft_lengths):
            totals[index] = add(totals[index], walk(chains, lengths, accepted, length))
    return totals
