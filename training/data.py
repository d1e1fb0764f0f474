"""Rows of token ids that the target wrote: how they are stored, and how they are read back.

A shard is one safetensors file with `tokens` (uint16 or int32, all rows end to end), `row_starts`
(int64 [rows + 1], the last is the number of tokens) and `answer_starts` (int32 [rows], counted from
the row's start: the first token that is the target's own output).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

SHARD_SUFFIX = ".safetensors"


class DataError(Exception):
    """A data file is missing or is not what this module writes; the text names the file."""


@dataclass(frozen=True, slots=True)
class Row:
    """One conversation: a prompt, then what the target wrote after it."""

    tokens: Sequence[int] | npt.NDArray[np.integer]
    answer_start: int  # index of the first token of the target's own


def write_rows(path: Path, rows: Iterable[Row]) -> int:
    """Write one shard, atomically; returns how many tokens it holds. Raises DataError for none."""
    tokens: list[npt.NDArray[np.int32]] = []
    starts = [0]
    answers: list[int] = []
    for row in rows:
        ids = np.asarray(row.tokens, dtype=np.int32)
        if not 0 <= row.answer_start <= len(ids):
            raise DataError(
                f"{path}: row {len(answers)}: answer_start is {row.answer_start}: must be 0 to "
                f"{len(ids)}, the length of the row"
            )
        tokens.append(ids)
        starts.append(starts[-1] + len(ids))
        answers.append(row.answer_start)
    if starts[-1] == 0:
        raise DataError(f"{path}: no rows to write")
    flat = np.concatenate(tokens)
    if int(flat.min()) < 0:
        raise DataError(f"{path}: token id {int(flat.min())} is negative")
    stored: npt.NDArray[np.generic] = flat
    if int(flat.max()) < 2**16:
        stored = flat.astype(np.uint16)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(
        {
            "tokens": stored,
            "row_starts": np.asarray(starts, dtype=np.int64),
            "answer_starts": np.asarray(answers, dtype=np.int32),
        },
        partial,
    )
    partial.replace(path)
    return starts[-1]


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows of one or more shards, in the order of the files."""

    tokens: npt.NDArray[np.int32]  # [tokens]
    row_starts: npt.NDArray[np.int64]  # [rows + 1]
    answer_starts: npt.NDArray[np.int32]  # [rows], counted from the row's start

    @classmethod
    def load(cls, paths: Sequence[Path]) -> "RowSet":
        """Read shards; raises DataError that names the file at fault."""
        if not paths:
            raise DataError("no data files were given")
        return join_rows([_load_shard(path) for path in paths])

    def __len__(self) -> int:
        return len(self.answer_starts)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:  # [rows]
        return np.diff(self.row_starts)

    @property
    def answer_token_count(self) -> int:
        return int((self.lengths - self.answer_starts).sum())

    def row(self, index: int) -> Row:
        start, end = int(self.row_starts[index]), int(self.row_starts[index + 1])
        return Row(self.tokens[start:end], int(self.answer_starts[index]))

    def select(self, indices: Sequence[int] | npt.NDArray[np.int64]) -> "RowSet":
        """The rows of these indices, in this order."""
        rows = [self.row(int(index)) for index in indices]
        lengths = np.asarray([len(row.tokens) for row in rows], dtype=np.int64)
        tokens = [np.asarray(row.tokens, dtype=np.int32) for row in rows]
        return RowSet(
            np.concatenate(tokens) if tokens else np.empty(0, dtype=np.int32),
            np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths))),
            np.asarray([row.answer_start for row in rows], dtype=np.int32),
        )

    def answer_mask(self) -> npt.NDArray[np.bool_]:  # [tokens]
        """True at every token that the target wrote."""
        offsets = np.arange(len(self.tokens)) - np.repeat(self.row_starts[:-1], self.lengths)
        mask: npt.NDArray[np.bool_] = offsets >= np.repeat(self.answer_starts, self.lengths)
        return mask


def join_rows(sets: Sequence[RowSet]) -> RowSet:
    """All rows of several sets, one set after the other."""
    lengths = np.concatenate([rows.lengths for rows in sets])
    return RowSet(
        np.concatenate([rows.tokens for rows in sets]),
        np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths))),
        np.concatenate([rows.answer_starts for rows in sets]),
    )


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a directory in order of their names; raises DataError where there are none."""
    paths = sorted(directory.glob(f"*{SHARD_SUFFIX}"))
    if not paths:
        raise DataError(f"{directory}: holds no {SHARD_SUFFIX} files")
    return paths


def _load_shard(path: Path) -> RowSet:
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    for name in ("tokens", "row_starts", "answer_starts"):
        if name not in stored:
            raise DataError(f"{path}: tensor {name} is missing")
    tokens = stored["tokens"].astype(np.int32)
    starts = stored["row_starts"].astype(np.int64)
    answers = stored["answer_starts"].astype(np.int32)
    if (
        len(starts) != len(answers) + 1
        or starts[0] != 0
        or starts[-1] != len(tokens)
        or bool((np.diff(starts) < 0).any())
    ):
        raise DataError(f"{path}: row_starts does not divide {len(tokens)} tokens into rows")
    if bool((answers < 0).any() or (answers > np.diff(starts)).any()):
        raise DataError(f"{path}: answer_starts has a value outside its row")
    return RowSet(tokens, starts, answers)
