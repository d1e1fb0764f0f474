"""Rows of like length side by side in fixed shapes, in an order that seed and epoch decide.

A row takes the smallest width, a multiple of `WIDTH_STEP`, that holds it; what does not fill a
batch of its width moves to the next one. So shapes repeat, and little is padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from training.data import RowSet

WIDTH_STEP = 64


@dataclass(frozen=True, slots=True)
class BatchRows:
    """Which rows stand in one batch, and how wide it is."""

    rows: npt.NDArray[np.int64]  # [batch]
    width: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch on the device. A chain is a position from which a draft can start: row i of the
    head, which predicts the token at i + 2, that token being the target's own."""

    tokens: torch.Tensor  # [batch, width] int64; 0 beyond a row's end
    source: torch.Tensor  # [batch, width] int64: index of each token in its row set
    chains: torch.Tensor  # [chains] int64: row of the batch * width + i
    chain_lengths: torch.Tensor  # [chains] int64: tokens at and after i + 2, at least 1
    token_count: int  # without padding


def plan_epoch(
    lengths: npt.NDArray[np.int64], *, tokens_per_batch: int, max_length: int, seed: int, epoch: int
) -> list[BatchRows]:
    """Every row once, in shuffled batches of at most `tokens_per_batch` tokens with padding.

    A longer row than `max_length` is cut there; one too long for a batch has a batch of its own.
    """
    random = np.random.default_rng((seed, epoch))
    order = random.permutation(len(lengths)).astype(np.int64)
    clipped = np.minimum(lengths, max_length)[order]
    widths = -(-clipped // WIDTH_STEP) * WIDTH_STEP
    batches: list[BatchRows] = []
    waiting = np.empty(0, dtype=np.int64)
    used_widths = [int(width) for width in np.unique(widths) if width > 0]
    for width in used_widths:
        waiting = np.concatenate((waiting, order[widths == width]))
        size = max(1, tokens_per_batch // width)
        whole = len(waiting) // size * size
        if width == used_widths[-1]:
            whole = len(waiting)
        for start in range(0, whole, size):
            batches.append(BatchRows(waiting[start : start + size], width))
        waiting = waiting[whole:]
    return [batches[index] for index in random.permutation(len(batches))]


class Batcher:
    """Builds batches on a device that holds all tokens of a row set."""

    def __init__(self, rows: RowSet, device: torch.device) -> None:
        self._rows = rows
        self._device = device
        self._tokens = torch.from_numpy(rows.tokens).to(device)

    def build(self, planned: BatchRows) -> Batch:
        """The batch, without waiting for the device."""
        starts = self._rows.row_starts[planned.rows]
        lengths = np.minimum(self._rows.lengths[planned.rows], planned.width)
        answers = self._rows.answer_starts[planned.rows]
        chains, chain_lengths = _chains(lengths, answers, planned.width)
        on_device = self._send(np.stack((starts, lengths)))
        offsets = torch.arange(planned.width, device=self._device)
        inside = offsets < on_device[1][:, None]
        source = (on_device[0][:, None] + offsets) * inside
        tokens = self._tokens[source].long() * inside
        sent = self._send(np.stack((chains, chain_lengths)))
        return Batch(tokens, source, sent[0], sent[1], int(lengths.sum()))

    def _send(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def batches_of(
    rows: RowSet, device: torch.device, *, tokens_per_batch: int, max_length: int
) -> Iterator[tuple[BatchRows, Batch]]:
    """Every row once, in an order that is always the same."""
    batcher = Batcher(rows, device)
    for planned in plan_epoch(
        rows.lengths, tokens_per_batch=tokens_per_batch, max_length=max_length, seed=0, epoch=0
    ):
        yield planned, batcher.build(planned)


def _chains(
    lengths: npt.NDArray[np.int64], answers: npt.NDArray[np.int32], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    firsts = np.maximum(answers.astype(np.int64) - 2, 0)
    counts = np.maximum(lengths - 2 - firsts, 0)
    total = int(counts.sum())
    row_of = np.repeat(np.arange(len(lengths)), counts)
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    positions = firsts[row_of] + within
    return row_of * width + positions, lengths[row_of] - 2 - positions
