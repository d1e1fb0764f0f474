"""A run's state in one file, written so that a reader sees the old one or the new one."""

import os
import pickle
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch


class ResumeError(Exception):
    """A checkpoint cannot continue this run; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """All that the next update depends on."""

    head: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    average: dict[str, torch.Tensor]  # empty where none is kept
    rng: torch.Tensor
    draft_ids: torch.Tensor
    layer_ids: list[int]
    data_digest: str  # of the rows trained on, and of what decides their order
    update: int
    epoch: int
    batch: int  # batches of the epoch that are done
    trained_tokens: int
    seconds: float  # trained so far, over all runs


def save_state(path: Path, state: RunState) -> None:
    """Write beside, flush to disk, rename."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        torch.save(asdict(state), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load_state(path: Path) -> RunState:
    """Read a checkpoint to CPU; raises ResumeError for a file that is not one."""
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return RunState(**stored)
    except (OSError, RuntimeError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise ResumeError(f"{path}: is not a checkpoint of this program: {error}") from error
