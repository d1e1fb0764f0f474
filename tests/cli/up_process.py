"""`outrider up` over the fake services, as a process that a test can read, signal and wait for."""

import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO

FAKES = Path(__file__).with_name("fakes")


class UpProcess:
    """Reads both outputs line by line from the start."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        path = os.pathsep.join(filter(None, (str(FAKES), os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES / "up_with_fakes.py"), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **variables},
        )
        self.output: list[str] = []
        self.errors: list[str] = []
        self._news: queue.Queue[str] = queue.Queue()
        self._readers = [
            self._read(self.process.stdout, self.output),
            self._read(self.process.stderr, self.errors),
        ]

    def wait_for(self, pattern: str, seconds: float = 20.0) -> str:
        """The first line, of those not looked at yet, in which the pattern is found."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                line = self._news.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() < deadline and self.process.poll() is None:
                    continue
                raise AssertionError(f"{pattern!r} did not come:\n{self.everything()}") from None
            if re.search(pattern, line):
                return line

    def exit_code(self, seconds: float = 20.0) -> int:
        """Waits for the end, outputs included."""
        code = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(seconds)
        return code

    def child_pid(self, service: str) -> int:
        """The process id of a running fake."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process.pid:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if f"fake_{service}".encode() in command:
                    return int(entry.name)
        raise AssertionError(f"no {service} runs:\n{self.everything()}")

    def everything(self) -> str:
        return "\n".join([*self.output, "---", *self.errors])

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.exit_code()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read(self, stream: IO[str] | None, lines: list[str]) -> threading.Thread:
        assert stream is not None

        def read() -> None:
            for line in stream:
                lines.append(line.rstrip("\n"))
                self._news.put(lines[-1])

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
