"""Stage `attention`: is a row's result independent of the other rows of its step, on this machine?

What the kernels of a processor do with few rows is measured, not known; every check is bitwise.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.engine.errors import InvarianceError
from outrider.engine.kv_cache import BlockPool
from outrider.engine.model import Decoder, gated
from outrider.engine.runner import Runner, SequenceRows
from outrider.engine.weights import with_max_rows

# Rows of a step are padded to one of these; fewer padding rows make a lone sequence faster.
ROW_MULTIPLES = (2, 8, 16, 32)
# Products of more rows are computed in pieces; 0 = whole. Pieces read the weights again, which only
# prompts feel. An Intel Xeon with AMX needs them: of float32 it treats 16 to 80 rows alike, and 88
# to 512, of bfloat16 32 to 192 (torch 2.11, products of 576 to 3072 columns).
LARGEST_PIECES = (0, 256, 128, 64)
# Row counts to try, in units of the multiple.
ROW_UNITS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 31, 32, 64, 128)
LARGEST_HEAD_ROWS = 64  # the head is the largest product; its rows are the few that are sampled
NUM_LAYERS = 2
# (tokens before, rows): around every bound of key lengths, as decode, verify and prefill rows.
SEQUENCES = (
    (0, 3),
    (5, 1),
    (126, 5),
    (130, 1),
    (250, 9),
    (255, 1),
    (300, 4),
    (511, 1),
    (509, 6),
    (40, 70),
    (700, 1),
)
ATTEMPTS = 2

RowOperation = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRule:
    """How rows have to be computed so that none depends on the others."""

    multiple: int  # a step is padded to a multiple of so many rows
    max_rows: int  # of one product; 0 = any number

    def words(self) -> str:
        """For the status."""
        pieces = f", products in pieces of {self.max_rows}" if self.max_rows else ""
        return f"rows padded to multiples of {self.multiple}{pieces}"


def find_row_rule(decoder: Decoder, max_step_rows: int) -> RowRule:
    """The rule under which every row-wise operation of the model is invariant: the largest pieces,
    then the fewest padding rows.

    Raises InvarianceError, naming operation and shapes, if there is none.
    """
    failure = ""
    for max_rows in LARGEST_PIECES:
        if max_rows >= max_step_rows:
            continue
        bounded = replace(decoder, weights=with_max_rows(decoder.weights, max_rows))
        for multiple in ROW_MULTIPLES:
            found = _first_failure(bounded, max_step_rows, multiple)
            if found is None:
                return RowRule(multiple=multiple, max_rows=max_rows)
            failure = found
    raise InvarianceError(failure)


def _first_failure(decoder: Decoder, max_step_rows: int, multiple: int) -> str | None:
    generator = torch.Generator().manual_seed(0)
    embedding = decoder.weights.embedding.weight
    config, layer = decoder.config, decoder.weights.layers[0]
    rotations = decoder.rotations[torch.arange(max_step_rows) % len(decoder.rotations)]

    def rotated(qkv: torch.Tensor) -> torch.Tensor:
        output = qkv.clone()
        decoder.rotate(layer, output, rotations[: len(qkv)].unsqueeze(1))
        return output

    qkv_size = config.query_size + 2 * config.kv_size
    operations: list[tuple[str, int, RowOperation, int]] = [
        ("input norm", config.hidden_size, layer.input_norm, max_step_rows),
        ("qkv product", config.hidden_size, layer.qkv, max_step_rows),
        ("rotation", qkv_size, rotated, max_step_rows),
        ("output product", config.query_size, layer.output, max_step_rows),
        ("gate-up product", config.hidden_size, layer.gate_up, max_step_rows),
        ("gated activation", 2 * config.intermediate_size, gated, max_step_rows),
        ("down product", config.intermediate_size, layer.down, max_step_rows),
        ("head product", config.hidden_size, decoder.weights.head, LARGEST_HEAD_ROWS),
    ]
    with torch.inference_mode():
        for name, width, operation, most in operations:
            largest = max(multiple, min(most, max_step_rows) // multiple * multiple)
            inputs = torch.randn(largest, width, generator=generator).to(embedding.dtype)
            counts = {multiple * unit for unit in ROW_UNITS if multiple * unit <= largest}
            whole = operation(inputs)
            for count in sorted(counts):
                if not torch.equal(operation(inputs[:count]), whole[:count]):
                    return (
                        f"{name}: rows of [{count}, {width}] differ from the same rows of "
                        f"[{largest}, {width}], {embedding.dtype}"
                    )
    return None


def check_steps(runner: Runner) -> str:
    """Compare ragged steps of the first layers and the head with each sequence alone.

    Returns what was compared; raises InvarianceError naming the rows that differ.
    """
    config = replace(runner.decoder.config, num_layers=NUM_LAYERS)
    weights = replace(runner.decoder.weights, layers=runner.decoder.weights.layers[:NUM_LAYERS])
    short = replace(runner, decoder=replace(runner.decoder, config=config, weights=weights))
    pool = BlockPool(runner.num_blocks)
    sequences = _sequences_that_fit(runner)
    random = np.random.default_rng(0)
    alone: list[np.ndarray] = []
    batch: list[SequenceRows] = []
    for before, count in sequences:
        token_ids = random.integers(0, config.vocab_size, before + count).tolist()
        table = pool.allocate(-(-len(token_ids) // runner.block_size))
        _prefill(short, token_ids[:before], table)
        alone.append(
            np.concatenate(
                [
                    short.forward([_rows(token_ids, table, position, position + 1)])
                    for position in range(before, before + count)
                ]
            )
        )
        batch.append(_rows(token_ids, table, before, before + count))
    for _ in range(ATTEMPTS):
        order = random.permutation(len(batch))
        found = short.forward([batch[index] for index in order])
        wanted = [alone[index] for index in order]
        _compare([sequences[index] for index in order], found, wanted, runner)
    for rows, wanted_rows, sequence in zip(batch, alone, sequences, strict=True):
        _compare([sequence], short.forward([rows]), [wanted_rows], runner)
    return (
        f"{len(batch)} sequences bitwise equal alone, row by row and in a step of "
        f"{sum(count for _, count in sequences)} rows"
    )


def _sequences_that_fit(runner: Runner) -> list[tuple[int, int]]:
    """SEQUENCES cut to the limits of the runner, at least one."""
    fitting = []
    num_rows = 0
    num_blocks = runner.num_blocks - 1
    for before, count in SEQUENCES:
        blocks = -(-(before + count) // runner.block_size)
        if (
            before + count <= runner.max_sequence_length
            and num_rows + count <= runner.max_step_rows
            and blocks <= num_blocks
        ):
            fitting.append((before, count))
            num_rows += count
            num_blocks -= blocks
    return fitting or [(0, 1)]


def _prefill(runner: Runner, token_ids: Sequence[int], table: Sequence[int]) -> None:
    for start in range(0, len(token_ids), runner.max_step_rows):
        chunk = token_ids[start : start + runner.max_step_rows]
        runner.forward(
            [SequenceRows(token_ids=chunk, start=start, block_table=table, num_logits=0)]
        )


def _rows(token_ids: Sequence[int], table: Sequence[int], start: int, end: int) -> SequenceRows:
    return SequenceRows(
        token_ids=token_ids[start:end], start=start, block_table=table, num_logits=end - start
    )


def _compare(
    sequences: Sequence[tuple[int, int]],
    found: np.ndarray,
    wanted: Sequence[np.ndarray],
    runner: Runner,
) -> None:
    row = 0
    for (before, count), logits in zip(sequences, wanted, strict=True):
        own = found[row : row + count]
        row += count
        if not np.isfinite(own).all():
            raise InvarianceError(f"logits of {count} rows from position {before} are not finite")
        if not np.array_equal(own, logits):
            config = runner.decoder.config
            raise InvarianceError(
                f"attention: {count} rows from position {before} differ by up to "
                f"{float(np.abs(own - logits).max()):.3g} between a step of {len(found)} rows and "
                f"rows alone ({config.num_heads} heads, {config.num_kv_heads} key heads of "
                f"{config.head_dim}, {runner.decoder.weights.embedding.weight.dtype}, "
                f"{torch.get_num_threads()} threads)"
            )
