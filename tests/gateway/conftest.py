"""A ready gateway that a module's tests share, and one of its own for a test that breaks it."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from cluster_under_test import ClusterUnderTest, running_cluster, running_loop


@pytest.fixture(scope="package")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    with running_loop() as loop:
        yield loop


@pytest.fixture(scope="module")
def ready(loop) -> Iterator[ClusterUnderTest]:
    with running_cluster(loop) as cluster:
        cluster.start_gateway()
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster(loop) -> Iterator[ClusterUnderTest]:
    with running_cluster(loop) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(ready) -> Iterator[openai.OpenAI]:
    """OpenAI's own package, for the gateway that a module's tests share."""
    http_client = httpx.Client(trust_env=False)
    with openai.OpenAI(
        base_url=f"{ready.url}/v1", api_key="none", max_retries=0, http_client=http_client
    ) as client:
        yield client
