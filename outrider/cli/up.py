"""`outrider up`: the three services in the foreground, and a line when they are ready."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

from rich.console import Console

from outrider.cli.cluster import Cluster
from outrider.cli.logs import ConsoleLogs, FileLogs, LogSink
from outrider.cli.progress import Display, LiveDisplay, PlainDisplay
from outrider.cli.supervisor import Supervisor
from outrider.serving.errors import ConfigurationError

Work = Callable[[str], Coroutine[object, object, int]]


def run_up(cluster: Cluster, *, log_directory: Path | None, work: Work) -> int:
    """Runs the services until asked to stop, with `work(url)` once they are ready; returns the
    exit code. Everything but what `work` prints goes to standard error.
    """
    display = _display(cluster, log_directory)
    supervisor = Supervisor(
        plans=cluster.plans,
        url=cluster.url,
        access=cluster.access,
        holds_failures=cluster.holds_failures,
        display=display,
    )
    try:
        return asyncio.run(supervisor.run(work))
    finally:
        display.close()


async def announce_and_wait(url: str) -> int:
    """Prints the `ready` line and never returns."""
    print(f"ready {url}", flush=True)
    await asyncio.get_running_loop().create_future()
    return 0


def _display(cluster: Cluster, log_directory: Path | None) -> Display:
    console = Console(stderr=True)
    logs: LogSink = ConsoleLogs(console)
    if log_directory is not None:
        try:
            log_directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--log-dir {log_directory}: {error.strerror}") from error
        logs = FileLogs(log_directory)
    if console.is_terminal:
        return LiveDisplay(console, logs, [plan.service for plan in cluster.plans])
    return PlainDisplay(console, logs)
