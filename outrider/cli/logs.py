"""Where the log lines of the services go: to the console, each with its service's name, or to one
file each.
"""

from pathlib import Path
from typing import IO, Protocol

from rich.console import Console


class LogSink(Protocol):
    """Takes log lines."""

    def write(self, service: str, line: str) -> None:
        """One line, without its end."""

    def close(self) -> None:
        """Nothing more will be written."""


class ConsoleLogs:
    """Prefixed lines on the console."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, service: str, line: str) -> None:
        self._console.out(f"{service:>7} | {line}", style="dim", highlight=False)

    def close(self) -> None:
        pass


class FileLogs:
    """`SERVICE.log` in a directory, appended to."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, IO[str]] = {}

    def write(self, service: str, line: str) -> None:
        if service not in self._files:
            self._files[service] = (self._directory / f"{service}.log").open("a", encoding="utf-8")
        file = self._files[service]
        file.write(f"{line}\n")
        file.flush()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
