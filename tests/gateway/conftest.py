"""A ready gateway that a module's tests share, and one of its own for a test that breaks it."""

from collections.abc import Iterator

import pytest
from cluster_under_test import ClusterUnderTest, running_cluster


@pytest.fixture(scope="module")
def ready() -> Iterator[ClusterUnderTest]:
    with running_cluster() as cluster:
        cluster.start_gateway()
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster() -> Iterator[ClusterUnderTest]:
    with running_cluster() as cluster:
        yield cluster
