"""Shows how far a run is: a bar on a terminal that has rich, plain lines elsewhere."""

import sys
from importlib.util import find_spec
from typing import Protocol


class Progress(Protocol):
    def show(self, fraction: float, text: str) -> None:
        """`fraction` (0 to 1) of the run is over; `text` is one line about it."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def close(self) -> None: ...


class PlainProgress:
    """One line per report."""

    def show(self, fraction: float, text: str) -> None:
        print(f"{fraction:6.1%}  {text}", flush=True)

    def note(self, text: str) -> None:
        print(text, flush=True)

    def close(self) -> None:
        pass


class BarProgress:
    """A bar at the foot of the terminal; notes scroll above it."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            BarColumn(24), TextColumn("{task.percentage:>5.1f}%  {task.description}"),
            TimeElapsedColumn(),
        )  # fmt: skip
        self._task = self._bar.add_task("starting", total=1.0)
        self._bar.start()

    def show(self, fraction: float, text: str) -> None:
        self._bar.update(self._task, completed=fraction, description=text)

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()


def open_progress() -> Progress:
    if sys.stdout.isatty() and find_spec("rich") is not None:
        return BarProgress()
    return PlainProgress()
