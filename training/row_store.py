"""Rows on their way to disk: shards of training rows and of held-out ones, and their counts."""

from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from training.author import NewRow
from training.data import SHARD_SUFFIX, Row, write_rows

TRAIN: Final = "train"
HELD_OUT: Final = "held_out"
_SHARD_ROWS: Final = 16384


class RowStore:
    """Writes shards into `directory`/train and `directory`/held_out, in a thread of its own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._waiting: dict[str, list[Row]] = {TRAIN: [], HELD_OUT: []}
        self._shards: Counter[str] = Counter()
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._writes: list[Future[int]] = []
        self.rows: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.answer_tokens: Counter[str] = Counter()
        self.by_kind: Counter[str] = Counter()

    def add(self, rows: list[NewRow]) -> None:
        for row in rows:
            split = HELD_OUT if row.is_held_out else TRAIN
            self._waiting[split].append(Row(row.tokens, row.answer_start))
            self.rows[split] += 1
            self.tokens[split] += len(row.tokens)
            self.answer_tokens[split] += len(row.tokens) - row.answer_start
            self.by_kind[row.kind] += 1
        for split, waiting in self._waiting.items():
            if len(waiting) >= _SHARD_ROWS:
                self._flush(split)

    def close(self) -> None:
        """Write what is left and wait; raises what writing raised."""
        for split, waiting in self._waiting.items():
            if waiting:
                self._flush(split)
        self._writer.shutdown()
        for write in self._writes:
            write.result()

    def _flush(self, split: str) -> None:
        path = self._directory / split / f"{self._shards[split]:05d}{SHARD_SUFFIX}"
        self._shards[split] += 1
        self._writes.append(self._writer.submit(write_rows, path, self._waiting[split]))
        self._waiting[split] = []
