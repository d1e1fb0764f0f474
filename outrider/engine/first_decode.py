"""The first decode: prefill, decode and verify rows through the path that requests take."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from outrider.engine.errors import InvarianceError
from outrider.engine.kv_cache import BlockPool
from outrider.engine.runner import Runner, SequenceRows

PROMPT_LENGTH = 12
NUM_DECODED = 4
MEASURED_ROWS = (1, 8, 16, 32, 64)
MEASUREMENTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDecode:
    """Evidence that this engine has decoded."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # decoded greedily after the prompt
    seconds: float
    compared: str  # what was found bitwise equal


def decode_once(runner: Runner, block_pool: BlockPool) -> FirstDecode:
    """Decode a few tokens and compare all ways of computing them; raises InvarianceError."""
    started = time.perf_counter()
    length = min(PROMPT_LENGTH, runner.max_sequence_length - NUM_DECODED)
    vocab_size = runner.decoder.config.vocab_size
    # Spread over the vocabulary, so that no special token decides the outcome.
    prompt = [(7 + 2_654_435_761 * index) % vocab_size for index in range(max(1, length))]
    num_tokens = len(prompt) + NUM_DECODED
    num_tokens = min(num_tokens, runner.max_sequence_length)
    num_decoded = num_tokens - len(prompt)
    with _blocks(runner, block_pool, num_tokens) as table:
        rows = [_forward(runner, table, prompt, 0, 1)]
        token_ids = [int(rows[0][0].argmax())]
        for index in range(num_decoded):
            rows.append(_forward(runner, table, token_ids[-1:], len(prompt) + index, 1))
            token_ids.append(int(rows[-1][0].argmax()))
        decoded = np.concatenate(rows)
    with _blocks(runner, block_pool, num_tokens) as table:
        first = _forward(runner, table, prompt, 0, 1)
        verify = _forward(runner, table, token_ids[:-1], len(prompt), num_decoded)
        _require_equal("decode", decoded, "verify", np.concatenate((first, verify)))
    with _blocks(runner, block_pool, num_tokens) as table:
        whole = _forward(runner, table, [*prompt, *token_ids[:-1]], 0, num_decoded + 1)
        _require_equal("decode", decoded, "prefill", whole)
    return FirstDecode(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(token_ids),
        seconds=time.perf_counter() - started,
        compared=f"{len(token_ids)} positions bitwise equal by decode, verify and prefill rows",
    )


def measure_steps(runner: Runner, block_pool: BlockPool) -> tuple[tuple[int, float], ...]:
    """Seconds of a forward of that many decode rows, the least of a few."""

    def forward_over(blocks: Sequence[int]) -> Callable[[], object]:
        batch = [
            SequenceRows(token_ids=[index % 7], start=0, block_table=[block], num_logits=1)
            for index, block in enumerate(blocks)
        ]
        return lambda: runner.forward(batch)

    return measure_rows(forward_over, block_pool, runner.max_step_rows)


def measure_rows(
    forward_over: Callable[[Sequence[int]], Callable[[], object]],
    block_pool: BlockPool,
    max_step_rows: int,
) -> tuple[tuple[int, float], ...]:
    """(rows, seconds), ascending: the least of a few runs of what `forward_over` makes of as many
    blocks as there are rows, one for each.
    """
    measured = []
    for count in MEASURED_ROWS:
        if count > min(max_step_rows, block_pool.num_free):
            break
        blocks = block_pool.allocate(count)
        forward = forward_over(blocks)
        seconds = []
        for _ in range(MEASUREMENTS):
            started = time.perf_counter()
            forward()
            seconds.append(time.perf_counter() - started)
        block_pool.release(blocks)
        measured.append((count, min(seconds)))
    return tuple(measured)


def step_milliseconds(step_seconds: Sequence[tuple[int, float]]) -> str:
    """What was measured, in one line for the status."""
    return ", ".join(f"{rows}: {seconds * 1e3:.1f}" for rows, seconds in step_seconds)


@contextmanager
def _blocks(runner: Runner, block_pool: BlockPool, num_tokens: int) -> Iterator[list[int]]:
    blocks = block_pool.allocate(-(-num_tokens // runner.block_size))
    try:
        yield blocks
    finally:
        block_pool.release(blocks)


def _forward(
    runner: Runner, table: Sequence[int], token_ids: Sequence[int], start: int, num_logits: int
) -> np.ndarray:
    rows = SequenceRows(token_ids=token_ids, start=start, block_table=table, num_logits=num_logits)
    return runner.forward([rows])


def _require_equal(name: str, left: np.ndarray, other_name: str, right: np.ndarray) -> None:
    if not np.isfinite(left).all():
        raise InvarianceError(f"logits of {name} rows are not finite")
    if np.array_equal(left, right):
        return
    largest = float(np.abs(left - right).max())
    raise InvarianceError(
        f"logits of {name} and {other_name} rows differ by up to {largest:.3g} "
        f"in {int((left != right).any(axis=1).sum())} of {len(left)} positions"
    )
