import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from up_process import UpProcess

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).with_name("fakes"))]


@pytest.fixture
def start_up() -> "Iterator[Callable[..., UpProcess]]":
    from up_process import UpProcess

    started: list[UpProcess] = []

    def start(*arguments: str, **variables: str) -> UpProcess:
        started.append(UpProcess(*arguments, **variables))
        return started[-1]

    yield start
    for process in started:
        process.close()
