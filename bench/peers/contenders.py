"""The servers that are compared: how each is started, and how one finds that it answers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from bench.peers import transformers_server
from bench.peers.checkpoints import hugging_face_checkpoint, shortened, unpacked
from bench.peers.install import FOLDER, Peers
from outrider.cli import tether
from outrider.cli.ports import free_port

READY_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.1
LOG_LINES = 5
LOOPBACK = "127.0.0.1"


class StartError(Exception):
    """A server did not come up; the text says how far it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all of them are to compute, and with what."""

    model: Path  # a GGUF file
    dtype: str
    threads: int
    most_at_once: int
    context: int  # tokens of prompt and answer that a request may have
    draft_tokens: int  # most that the peers' own speculation drafts
    assistant_layers: int
    peers: Peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One server. `command` is given the port to listen on."""

    name: str
    command: Callable[[int], Sequence[str]]
    ready_path: str
    answers_one_at_a_time: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def _outrider(setup: Setup, name: str, draft: str) -> Contender:
    def command(port: int) -> Sequence[str]:
        words = [sys.executable, "-m", "outrider.cli.main", "up", "--rest-port", str(port)]
        words += ["--model", str(setup.model), "--dtype", setup.dtype]
        return [*words, "--draft", draft] if draft else words

    return Contender(name=name, command=command, ready_path="/readyz")


def _llama_cpp(setup: Setup, name: str, model: Path, *flags: str) -> Contender:
    def command(port: int) -> Sequence[str]:
        words = [str(setup.peers.llama_server), "--model", str(model)]
        words += ["--host", LOOPBACK, "--port", str(port), "--threads", str(setup.threads)]
        words += ["--parallel", str(setup.most_at_once)]
        # Divided among the slots.
        words += ["--ctx-size", str(setup.most_at_once * setup.context)]
        return [*words, *flags]

    return Contender(name=name, command=command, ready_path="/health")


def _ngrams(setup: Setup) -> tuple[str, ...]:
    """Its own defaults, matches of 12 tokens and drafts of 48, are for the rewriting of long texts;
    on prompts like these they draft next to nothing.
    """
    size = str(setup.draft_tokens)
    return ("--spec-type", "ngram-simple",
            "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", size)  # fmt: skip


def _transformers(setup: Setup, name: str, mode: str) -> Contender:
    words = [str(setup.peers.python), transformers_server.__file__]
    words += [str(hugging_face_checkpoint(setup.model)), "--mode", mode]
    words += ["--dtype", setup.dtype, "--draft-tokens", str(setup.draft_tokens)]
    if mode == "assisted":
        drafter = hugging_face_checkpoint(shortened(setup.model, setup.assistant_layers))
        words += ["--assistant", str(drafter)]
    return Contender(
        name=name,
        command=lambda port: [*words, "--port", str(port)],
        ready_path="/v1/models",
        answers_one_at_a_time=True,
        environment={"OMP_NUM_THREADS": str(setup.threads)},
    )


# By what they are called on the command line. Each writes the files that it needs.
CONTENDERS: Mapping[str, Callable[[Setup], Contender]] = {
    "outrider-none": lambda setup: _outrider(setup, "Outrider, no drafts", "none"),
    "outrider": lambda setup: _outrider(setup, "Outrider", ""),
    "llama.cpp": lambda setup: _llama_cpp(setup, "llama.cpp", setup.model),
    "llama.cpp-ngram": lambda setup: _llama_cpp(
        setup, "llama.cpp, n-grams", setup.model, *_ngrams(setup)
    ),
    "llama.cpp-unpacked": lambda setup: _llama_cpp(
        setup, f"llama.cpp, {setup.dtype}", unpacked(setup.model, setup.dtype)
    ),
    "transformers": lambda setup: _transformers(setup, "transformers", "plain"),
    "transformers-lookup": lambda setup: _transformers(
        setup, "transformers, prompt lookup", "lookup"
    ),
    "transformers-assisted": lambda setup: _transformers(
        setup, "transformers, assisted", "assisted"
    ),
}


@contextmanager
def running(contender: Contender) -> Iterator[str]:
    """Its URL, from when it answers on; stopped at the end. Raises StartError."""
    port = free_port(LOOPBACK, set())
    command = contender.command(port)
    log = FOLDER / f"{contender.name.replace(' ', '-')}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            # Nothing may be left running when a measurement is killed.
            [sys.executable, tether.__file__, str(os.getpid()), *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **contender.environment},
        )
        url = f"http://{LOOPBACK}:{port}"
        try:
            _wait_ready(contender, process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            finally:
                process.kill()
                process.wait()


def _wait_ready(
    contender: Contender, process: "subprocess.Popen[bytes]", url: str, log: Path
) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    with httpx.Client(base_url=url, trust_env=False, timeout=5) as client:
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if client.get(contender.ready_path).status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(POLL_SECONDS)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
    state = "is not ready" if process.poll() is None else f"exited with {process.returncode}"
    raise StartError("\n".join([f"{contender.name} {state}:", *lines]))
