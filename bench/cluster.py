"""A cluster for measurements and tests: `outrider up` as a child process, as a user would run
it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import httpx

from outrider.bench.prompts import read_prompts
from outrider.cli import tether

READY_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 30.0


class Cluster:
    """A running `outrider up`. Lines that it prints are kept."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [
                # Nothing may be left running when a measurement is killed.
                sys.executable,
                tether.__file__,
                str(os.getpid()),
                sys.executable,
                "-m",
                "outrider.cli.main",
                "up",
                "--rest-port",
                "0",
                *arguments,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.output: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._keep, args=(stream, lines), daemon=True)
            for stream, lines in (
                (self.process.stdout, self.output),
                (self.process.stderr, self.errors),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _keep(self, stream: IO[str], lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line.rstrip("\n"))

    def wait_ready(self) -> "Cluster":
        """Waits for the `ready` line. Raises RuntimeError with what was printed if there is
        none.
        """
        deadline = time.monotonic() + READY_TIMEOUT_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in list(self.output):
                if line.startswith("ready "):
                    self.url = line.removeprefix("ready ")
                    return self
            time.sleep(0.05)
        raise RuntimeError("not ready:\n" + "\n".join([*self.output, *self.errors]))

    @cached_property
    def _client(self) -> httpx.Client:
        """One for all requests of all threads: each new one would cost tens of milliseconds."""
        return httpx.Client(
            base_url=self.url,
            timeout=600,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    def get(self, path: str) -> httpx.Response:
        return self._client.get(path, timeout=10)

    def complete(self, **request: Any) -> dict[str, Any]:
        """One chat or text completion, with token ids."""
        path = "/v1/chat/completions" if "messages" in request else "/v1/completions"
        response = self._client.post(
            path, json={"model": self.model, "return_token_ids": True, **request}
        )
        if response.status_code != httpx.codes.OK:
            raise RuntimeError(f"{path} answered {response.status_code}: {response.text}")
        answer: dict[str, Any] = response.json()
        return answer

    @cached_property
    def model(self) -> str:
        name: str = self.get("/v1/models").json()["data"][0]["id"]
        return name

    def metrics(self) -> dict[str, float]:
        """All samples of /metrics by name and labels, as written there."""
        samples = {}
        for line in self.get("/metrics").text.splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                samples[name] = float(value)
        return samples

    def process_id(self, service: str) -> int:
        """The process id of a service, as its status says."""
        details = self.get("/status").json()["details"]
        return int(details[service]["process_id"])

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        if "_client" in self.__dict__:
            self._client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(STOP_TIMEOUT_SECONDS)
        finally:
            self.process.kill()
            for reader in self._readers:
                reader.join(5)


@contextmanager
def running_cluster(*arguments: str, **environment: str) -> Iterator[Cluster]:
    """A cluster that is ready, and stopped at the end."""
    cluster = Cluster(arguments, environment)
    try:
        yield cluster.wait_ready()
    finally:
        cluster.stop()


def first_turns(path: Path, count: int) -> list[str]:
    """Prompts of a file that `outrider bench` could read too, evenly spread over it."""
    prompts = read_prompts(path)
    stride = max(len(prompts) / count, 1)
    return [prompts[int(index * stride)] for index in range(min(count, len(prompts)))]
