"""A bar over the requests of a benchmark."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.bench.measure import Plan


@contextmanager
def progress_bar(console: Console, plan: Plan, words: str) -> Iterator[Callable[[str], None]]:
    """Over all requests of one server, each told by its load; a line at its end where nobody
    looks.
    """
    total = sum(plan.count(load) + plan.warm_up_count(load) for load in plan.loads)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task(words, total=total)
        yield lambda load: bar.update(task, description=f"{words}, {load}", advance=1)
    console.print(f"{words}: done", highlight=False)
