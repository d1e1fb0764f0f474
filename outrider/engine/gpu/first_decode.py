"""The first decode on a GPU: every graph against single launches, and one request by all paths."""

import time
from collections.abc import Callable, Sequence

import torch

from outrider.engine.acceptance import Verdict
from outrider.engine.errors import InvarianceError
from outrider.engine.first_decode import NUM_DECODED, PROMPT_LENGTH, FirstDecode, measure_rows
from outrider.engine.gpu.steps import GpuSteps, run_step
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import SequenceStep

GREEDY = Sampling(temperature=0.0)
# Of the largest logit: what two batch shapes may differ by in bfloat16.
LARGEST_DIFFERENCE = 0.05
# Where the compared sequences begin, one after another: at tokens 0, 1 and 2.
OFFSETS = 3


def decode_once(steps: GpuSteps, block_pool: BlockPool) -> FirstDecode:
    """Runs every graph and compares it with what it was captured from, then decodes a few tokens
    as a request would, plainly and with them as drafts. Raises InvarianceError.
    """
    started = time.perf_counter()
    num_graphs = _compare_graphs(steps, block_pool)
    vocab_size = steps.decoder.config.vocab_size
    max_length = steps.bounds.max_sequence_length
    length = max(1, min(PROMPT_LENGTH, max_length - NUM_DECODED - 1))
    # Spread over the vocabulary, so that no special token decides the outcome.
    prompt = [(7 + 2_654_435_761 * index) % vocab_size for index in range(length)]
    num_decoded = min(NUM_DECODED, max_length - length - 1)
    table = block_pool.allocate(-(-(length + num_decoded + 1) // steps.bounds.block_size))
    try:
        first, rows = _run(steps, table, prompt, 0, num_logits=1)
        token_ids = [first.bonus_token_id]
        decoded = [rows]
        for index in range(num_decoded):
            verdict, rows = _run(steps, table, token_ids[-1:], length + index, num_logits=1)
            token_ids.append(verdict.bonus_token_id)
            decoded.append(rows)
        whole = [*prompt, *token_ids[:-1]]
        _, prefilled = _run(steps, table, whole, 0, num_logits=num_decoded + 1)
        largest = _largest_difference("prefill", torch.cat(decoded), prefilled)
        draft_length = min(num_decoded, steps.bounds.max_draft_length)
        if draft_length:
            drafted = token_ids[: 1 + draft_length]
            verdict, rows = _run(
                steps, table, drafted, length, num_logits=len(drafted), draft_length=draft_length
            )
            wanted = torch.cat(decoded[1 : 2 + draft_length])
            largest = max(largest, _largest_difference("verify", wanted, rows[: len(wanted)]))
            _require_accepted(verdict, rows, draft_length, largest)
    finally:
        block_pool.release(table)
    return FirstDecode(
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(token_ids),
        seconds=time.perf_counter() - started,
        compared=f"{num_graphs} graphs bitwise equal to single launches; logits of decode, verify "
        f"and prefill rows differ by at most {largest:.3g}",
    )


def measure_steps(steps: GpuSteps, block_pool: BlockPool) -> tuple[tuple[int, float], ...]:
    """Seconds of a step of that many decode rows, the least of a few."""

    def step_over(blocks: Sequence[int]) -> Callable[[], object]:
        sequences = [
            _sequence([index % 7], [block], 0, num_logits=1, draft_length=0)
            for index, block in enumerate(blocks)
        ]
        return lambda: steps.launch(sequences, None).verdicts()

    most = min(steps.bounds.max_step_rows, steps.bounds.max_sequences)
    return measure_rows(step_over, block_pool, most)


def _compare_graphs(steps: GpuSteps, block_pool: BlockPool) -> int:
    """Every graph that a step may run, over sequences of a few tokens; how many there are."""
    bounds = steps.bounds
    vocab_size = steps.decoder.config.vocab_size
    blocks_each = -(-(bounds.max_draft_length + 1 + OFFSETS) // bounds.block_size)
    # In a cache of few blocks as many sequences as the largest graphs have cannot run.
    most = min(bounds.max_sequences, block_pool.num_free // blocks_each)
    blocks = block_pool.allocate(most * blocks_each)
    num_compared = 0
    try:
        for (count, rows_each), graph in steps.graphs.items():
            # With as many rows as steps have; the graph fills up the rest.
            used = min(count, most, bounds.max_step_rows // rows_each)
            if used < bounds.fewest_sequences[count]:
                continue
            num_compared += 1
            sequences = [
                _sequence(
                    [(31 * index + 7 * row + 1) % vocab_size for row in range(rows_each)],
                    blocks[index * blocks_each : (index + 1) * blocks_each],
                    min(index % OFFSETS, bounds.max_sequence_length - rows_each),
                    num_logits=rows_each,
                    draft_length=rows_each - 1,
                )
                for index in range(used)
            ]
            steps.launch(sequences, None).verdicts()
            replayed = graph.logits.clone()
            results = steps.memory.results.clone()
            with torch.inference_mode():
                launched = run_step(steps.decoder, steps.memory, graph.inputs, graph.attention)
                is_equal = torch.equal(replayed, launched)
            if not is_equal or not bool(torch.isfinite(replayed).all()):
                largest = float((replayed.float() - launched.float()).abs().max())
                raise InvarianceError(
                    f"graph of {count} sequences with {rows_each} rows: its logits differ from "
                    f"those of single launches by up to {largest:.3g}"
                )
            size = graph.inputs.shape.num_logits + graph.inputs.shape.num_sequences
            if not torch.equal(results[:size], steps.memory.results[:size]):
                raise InvarianceError(
                    f"graph of {count} sequences with {rows_each} rows: it drew other tokens than "
                    "single launches"
                )
    finally:
        block_pool.release(blocks)
    return num_compared


def _sequence(
    token_ids: Sequence[int],
    table: Sequence[int],
    start: int,
    *,
    num_logits: int,
    draft_length: int,
) -> SequenceStep:
    return SequenceStep(
        rows=SequenceRows(
            token_ids=token_ids, start=start, block_table=table, num_logits=num_logits
        ),
        draft_length=draft_length,
        sampling=GREEDY,
        base_length=start + len(token_ids) - draft_length,
    )


def _run(
    steps: GpuSteps,
    table: Sequence[int],
    token_ids: Sequence[int],
    start: int,
    *,
    num_logits: int,
    draft_length: int = 0,
) -> tuple[Verdict, torch.Tensor]:
    """One sequence's step, and its logits as float32 [num_logits, vocab_size]."""
    sequence = _sequence(token_ids, table, start, num_logits=num_logits, draft_length=draft_length)
    running = steps.launch([sequence], None)
    (verdict,) = running.verdicts()
    return verdict, running.logits[:num_logits].float()


def _largest_difference(name: str, decoded: torch.Tensor, other: torch.Tensor) -> float:
    if not bool(torch.isfinite(other).all()):
        raise InvarianceError(f"logits of {name} rows are not finite")
    largest = float((decoded - other).abs().max())
    bound = LARGEST_DIFFERENCE * float(decoded.abs().max())
    if largest > bound:
        raise InvarianceError(
            f"logits of decode and {name} rows differ by up to {largest:.3g}: must be at most "
            f"{bound:.3g}"
        )
    return largest


def _require_accepted(
    verdict: Verdict, rows: torch.Tensor, draft_length: int, largest: float
) -> None:
    """What was decoded must be accepted as a draft, but for a near tie."""
    if verdict.accepted_length == draft_length:
        return
    best, second = rows[verdict.accepted_length].topk(2).values.tolist()
    if best - second > 2 * largest:
        raise InvarianceError(
            f"a draft of {draft_length} tokens that were decoded plainly was accepted up to "
            f"{verdict.accepted_length}, and the next is no near tie ({best:.5g}, {second:.5g})"
        )
