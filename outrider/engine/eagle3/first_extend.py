"""The first decode of a head: true features in one piece and row by row, drafted rows, and the same
rows run again, through the path that requests take.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.eagle3.head_runner import HeadOutput, HeadRunner
from outrider.engine.errors import InvarianceError
from outrider.engine.first_decode import measure_rows
from outrider.engine.kv_cache import BlockPool
from outrider.engine.step import SequenceRows

NUM_ROWS = 12
NUM_DRAFTED = 4
# Largest difference of two logits that are computed in different ways, over the largest logit.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstExtend:
    """Evidence that this head has run and drafted."""

    num_rows: int
    draft_ids: tuple[int, ...]  # drafted greedily behind the rows, by the head's own ids
    seconds: float
    compared: str


def extend_once(runner: HeadRunner, block_pool: BlockPool) -> FirstExtend:
    """Run a few rows in all ways and compare; raises InvarianceError."""
    started = time.perf_counter()
    config = runner.head.config
    count = min(NUM_ROWS, runner.max_sequence_length - NUM_DRAFTED)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, config.hidden_size, generator=generator).to(runner.dtype)
    # Spread over the vocabulary, so that no special token decides the outcome.
    token_ids = [(7 + 2_654_435_761 * index) % config.layer.vocab_size for index in range(count)]
    table = block_pool.allocate(-(-(count + NUM_DRAFTED) // runner.block_size))
    try:
        whole = _run(runner, table, token_ids, features, 0)
        single = [
            _run(runner, table, token_ids[row : row + 1], features[row : row + 1], row).logits
            for row in range(count)
        ]
        _require_alike(runner, "rows in one piece", whole.logits, "rows alone", single)
        draft_ids = _draft(runner, table, whole, count)
        tail = count // 2
        again = _run(runner, table, token_ids[tail:], features[tail:], tail).logits
        _require_alike(runner, "rows in one piece", whole.logits[tail:], "rows run again", [again])
    finally:
        block_pool.release(table)
    return FirstExtend(
        num_rows=count,
        draft_ids=tuple(draft_ids),
        seconds=time.perf_counter() - started,
        compared=f"{count} rows alike in one piece, alone and run again behind a draft of "
        f"{NUM_DRAFTED} tokens, within {TOLERANCES[runner.dtype]:g} of the largest logit",
    )


def measure_head_steps(runner: HeadRunner, block_pool: BlockPool) -> tuple[tuple[int, float], ...]:
    """Seconds of a forward of that many drafted rows of as many sequences, the least of a few."""

    def forward_over(blocks: Sequence[int]) -> Callable[[], object]:
        batch = [
            SequenceRows(token_ids=(0,), start=0, block_table=[block], num_logits=1)
            for block in blocks
        ]
        features = torch.ones(len(blocks), runner.head.config.hidden_size, dtype=runner.dtype)
        return lambda: runner.forward(batch, features)

    return measure_rows(forward_over, block_pool, runner.max_step_rows)


def _draft(
    runner: HeadRunner, table: Sequence[int], output: HeadOutput, num_rows: int
) -> list[int]:
    target_ids = runner.head.weights.target_token_ids
    draft_ids = []
    for index in range(NUM_DRAFTED):
        draft_ids.append(int(output.logits[-1].argmax()))
        token_id = draft_ids[-1] if target_ids is None else int(target_ids[draft_ids[-1]])
        output = _run(runner, table, [token_id], output.features[-1:], num_rows + index)
        if not np.isfinite(output.logits).all():
            raise InvarianceError(f"logits of draft position {index + 1} are not finite")
    return draft_ids


def _run(
    runner: HeadRunner,
    table: Sequence[int],
    token_ids: Sequence[int],
    features: torch.Tensor,
    start: int,
) -> HeadOutput:
    rows = SequenceRows(
        token_ids=token_ids, start=start, block_table=table, num_logits=len(token_ids)
    )
    return runner.forward([rows], features)


def _require_alike(
    runner: HeadRunner,
    name: str,
    left: npt.NDArray[np.float32],
    other_name: str,
    parts: Sequence[npt.NDArray[np.float32]],
) -> None:
    right = np.concatenate(parts)
    for words, logits in ((name, left), (other_name, right)):
        if not np.isfinite(logits).all():
            raise InvarianceError(f"logits of {words} are not finite")
    difference, largest = float(np.abs(left - right).max()), float(np.abs(left).max())
    if difference > TOLERANCES[runner.dtype] * largest:
        raise InvarianceError(
            f"logits of {name} and {other_name} differ by up to {difference:.3g}, and the largest "
            f"is {largest:.3g}: must be within {TOLERANCES[runner.dtype]:g} of it, {runner.dtype}"
        )
