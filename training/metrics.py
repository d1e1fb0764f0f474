"""The record of a run: one JSON object per line, in the order of updates."""

import json
from collections.abc import Mapping
from pathlib import Path


class MetricsFile:
    """Appends records; each is on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, first_update: int) -> None:
        """Drop what an earlier run wrote after the update that this one continues from."""
        kept = [one for one in read_metrics(self._path) if _update(one) <= first_update]
        if first_update == 0:
            kept = []
        text = "".join(json.dumps(one) + "\n" for one in kept)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(text, encoding="utf-8")

    def write(self, record: Mapping[str, object]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def read_metrics(path: Path) -> list[dict[str, object]]:
    """All whole records of a file; none where there is no file."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        # The last line of a run that was killed can be cut short.
        if line.endswith("\n"):
            records.append(json.loads(line))
    return records


def _update(record: Mapping[str, object]) -> int:
    update = record["update"]
    assert isinstance(update, int)
    return update
