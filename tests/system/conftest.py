"""Real clusters of three processes with the default model."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.cluster import Cluster, running_cluster
from bench.truncate import truncate
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def ngram_cluster() -> Iterator[Cluster]:
    """Speculation on wherever the n-gram drafter matches."""
    with running_cluster("--draft", "ngram", "--speculation", "fixed") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model cut to its first 24 layers: a draft that is right now and then."""
    path = tmp_path_factory.mktemp("models") / "first-24-layers.gguf"
    truncate(resolve_model(DEFAULT_MODEL).path, path, 24)
    return path


@pytest.fixture
def unused_tcp_port() -> int:
    """A loopback port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's first layer: a second to load."""
    path = tmp_path_factory.mktemp("tiny") / "first-layer.gguf"
    truncate(resolve_model(DEFAULT_MODEL).path, path, 1)
    return path
