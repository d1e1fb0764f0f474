"""Shared by the draft service's tests."""

from collections.abc import Iterator

import pytest
from draft_server import runner


@pytest.fixture(scope="session", autouse=True)
def event_loop_of_all_tests() -> Iterator[None]:
    """Closes the tests' event loop behind the last of them."""
    yield
    if runner.cache_info().currsize:
        runner().close()
