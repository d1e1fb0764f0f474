"""Where the target's features come from: computed for each batch, or computed once and kept."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from training.batches import Batch, BatchRows, batches_of
from training.data import DataError, RowSet
from training.loss import TargetRows
from training.target import DenseTarget


class ComputedRows:
    """Runs the frozen target over each batch."""

    def __init__(self, target: DenseTarget, layer_ids: tuple[int, ...]) -> None:
        self._target = target
        self._layer_ids = layer_ids

    def __call__(self, planned: BatchRows, batch: Batch) -> TargetRows:
        del planned
        features, final_hidden = self._target(batch.tokens, self._layer_ids)
        return TargetRows(features, final_hidden)


class StoredRows:
    """Reads what the target gave for every token of a row set; for data that fits memory."""

    def __init__(self, stored: dict[str, torch.Tensor], device: torch.device) -> None:
        self._features = stored["features"]  # [tokens, layers * hidden_size]
        self._final_hidden = stored["final_hidden"]  # [tokens, hidden_size]
        self._device = device

    def __call__(self, planned: BatchRows, batch: Batch) -> TargetRows:
        del planned
        source = batch.source.to(self._features.device)
        return TargetRows(
            self._features[source].to(self._device), self._final_hidden[source].to(self._device)
        )


def stored_rows(
    directory: Path,
    rows: RowSet,
    computed: ComputedRows,
    *,
    identity: str,
    device: torch.device,
    max_length: int,
) -> StoredRows:
    """Open the features of a row set, or compute and write them.

    `identity` says what they depend on besides the tokens (target, layers). Raises DataError for a
    file that does not belong to the rows.
    """
    digest = hashlib.sha256(f"{identity} {max_length} {device.type}".encode())
    digest.update(rows.tokens.tobytes())
    digest.update(rows.row_starts.tobytes())
    path = directory / f"features-{digest.hexdigest()[:16]}.safetensors"
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        save_file(_compute(rows, computed, device, max_length), partial)
        partial.replace(path)
    stored = load_file(path)
    if len(stored.get("features", ())) != len(rows.tokens):
        raise DataError(f"{path}: does not hold features of {len(rows.tokens)} tokens")
    return StoredRows(stored, device)


def _compute(
    rows: RowSet, computed: ComputedRows, device: torch.device, max_length: int
) -> dict[str, torch.Tensor]:
    kept: dict[str, torch.Tensor] = {}
    for planned, batch in batches_of(
        rows, device, tokens_per_batch=max_length, max_length=max_length
    ):
        found = computed(planned, batch)
        parts = {"features": found.features, "final_hidden": found.final_hidden}
        for name, part in parts.items():
            if name not in kept:
                kept[name] = torch.zeros(len(rows.tokens), part.shape[-1], dtype=part.dtype)
            for row, index in enumerate(planned.rows):
                start = int(rows.row_starts[index])
                count = min(int(rows.lengths[index]), planned.width)
                kept[name][start : start + count] = part[row, :count].cpu()
    return kept
