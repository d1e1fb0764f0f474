"""Installs what is compared with: transformers, and llama.cpp's server built from source.

    python -m bench.peers.install [--jobs 2]

Everything goes to `build/peers`, which git ignores: a virtual environment of its own, so that the
project's dependencies stay what they are, and llama.cpp as the package `llama-cpp-python` ships
its source, for this machine's processor. What is there already is not made again.
"""

import argparse
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
FOLDER = PROJECT / "build" / "peers"
LLAMA_CPP_PYTHON = "0.3.36"
# Of the virtual environment; versions that the project uses too are those of its constraints.
PACKAGES = ("torch", "transformers", "accelerate", "gguf", "numpy", "jinja2", "cmake", "ninja")
CMAKE_OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    # The page that the server can show would be fetched while it is built.
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_OPENSSL": "OFF",
}


class InstallError(Exception):
    """A peer cannot be had on this machine; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """What is installed."""

    python: Path
    llama_server: Path


def install(jobs: int) -> Peers:
    """Makes what is missing; raises InstallError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    python = _environment()
    return Peers(python=python, llama_server=_llama_server(python, jobs))


def installed() -> Peers:
    """What `install` made; raises InstallError where it was not run."""
    peers = Peers(python=_python(FOLDER / "venv"), llama_server=_built_server())
    for path in (peers.python, peers.llama_server):
        if not path.exists():
            raise InstallError(f"{path} is missing: run python -m bench.peers.install first")
    return peers


def versions(peers: Peers) -> dict[str, str]:
    """Of what is compared with; raises InstallError."""
    script = (
        "import importlib.metadata as packages\n"
        "for name in ('torch', 'transformers'): print(name, packages.version(name))"
    )
    try:
        answer = subprocess.run(
            [str(peers.python), "-c", script], check=True, stdout=subprocess.PIPE, text=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(f"{peers.python}: {error}") from error
    lines = [line.split() for line in answer.stdout.splitlines()]
    return {"llama-cpp-python": LLAMA_CPP_PYTHON, **{name: version for name, version in lines}}


def _environment() -> Path:
    venv = FOLDER / "venv"
    python = _python(venv)
    complete = venv / ".complete"
    if complete.exists():
        return python
    _run([sys.executable, "-m", "venv", str(venv)])
    constraints = ["-c", str(PROJECT / "constraints.txt")]
    _run([str(python), "-m", "pip", "install", "--quiet", *constraints, *PACKAGES])
    complete.touch()
    return python


def _llama_server(python: Path, jobs: int) -> Path:
    server = _built_server()
    if server.exists():
        return server
    # Of the environment's own, whatever the machine has.
    tools = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    source = _llama_cpp_source(python)
    build = server.parents[1]
    options = [f"-D{name}={value}" for name, value in CMAKE_OPTIONS.items()]
    _run(["cmake", "-G", "Ninja", "-S", str(source), "-B", str(build), *options], tools)
    _run(["cmake", "--build", str(build), "--target", "llama-server", "-j", str(jobs)], tools)
    if not server.exists():
        raise InstallError(f"the build of llama.cpp ended without {server}")
    return server


def _llama_cpp_source(python: Path) -> Path:
    name = f"llama_cpp_python-{LLAMA_CPP_PYTHON}"
    source = FOLDER / name / "vendor" / "llama.cpp"
    if source.exists():
        return source
    package = "llama-cpp-python"
    archive = FOLDER / f"{name}.tar.gz"
    if not archive.exists():
        download = [str(python), "-m", "pip", "download", "--quiet", "--no-deps"]
        download += ["--no-binary", package, "--dest", str(FOLDER)]
        _run([*download, f"{package}=={LLAMA_CPP_PYTHON}"])
    with tarfile.open(archive) as contents:
        contents.extractall(FOLDER, filter="data")
    return source


def _python(venv: Path) -> Path:
    return venv / "bin" / "python"


def _built_server() -> Path:
    return FOLDER / f"llama.cpp-{LLAMA_CPP_PYTHON}" / "bin" / "llama-server"


def _run(command: Sequence[str], environment: dict[str, str] | None = None) -> None:
    print(" ".join(command), file=sys.stderr, flush=True)
    try:
        subprocess.run(
            command, check=True, env={**os.environ, **(environment or {})}, stdout=sys.stderr
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InstallError(str(error)) from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    try:
        peers = install(arguments.jobs)
    except InstallError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    print(peers.python)
    print(peers.llama_server)
    return 0


if __name__ == "__main__":
    sys.exit(main())
