"""Shows on standard error how far a run is: a bar on a terminal, plain lines elsewhere."""

import sys
from importlib.util import find_spec
from typing import Protocol


class Progress(Protocol):
    def show(self, fraction: float, text: str) -> None:
        """`fraction` (0 to 1) of the stage is over; `text` is one line about it."""
        ...

    def note(self, text: str) -> None:
        """One line that stays."""
        ...

    def close(self) -> None: ...


class PlainProgress:
    """One line per report."""

    def show(self, fraction: float, text: str) -> None:
        self.note(f"{fraction:6.1%}  {text}")

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class BarProgress:
    """A bar at the foot of the terminal, the last report below it; notes scroll above."""

    def __init__(self) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, TaskProgressColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        self._bar = RichProgress(BarColumn(40), TaskProgressColumn(), TimeElapsedColumn())
        self._task = self._bar.add_task("", total=1.0)
        self._report = Text()
        self._console = Console(stderr=True)
        self._live = Live(Group(self._bar, self._report), console=self._console)

    def show(self, fraction: float, text: str) -> None:
        self._start()
        self._bar.update(self._task, completed=fraction)
        self._report.plain = text

    def note(self, text: str) -> None:
        self._start()
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _start(self) -> None:
        # Not at once: the bar has a thread, and a process with threads should not fork workers.
        if not self._live.is_started:
            self._live.start()


def open_progress() -> Progress:
    if sys.stderr.isatty() and find_spec("rich") is not None:
        return BarProgress()
    return PlainProgress()
