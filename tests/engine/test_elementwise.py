"""Row slices keep elementwise results independent of the number of rows and threads."""

from collections.abc import Iterator

import pytest
import torch

from outrider.engine.elementwise import row_slices
from outrider.engine.model import gated


@pytest.fixture(params=[1, 2, 3])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 7), (8, 9000), (50, 1536), (300, 40000)])
def test_slices_cover_every_row_once(num_rows: int, width: int, num_threads: int) -> None:
    slices = row_slices(num_rows, width)
    covered = [row for rows in slices for row in range(num_rows)[rows]]
    assert covered == list(range(num_rows))


@pytest.mark.parametrize("size", [1001, 1536])
def test_gated_rows_do_not_depend_on_how_many_there_are(size: int, num_threads: int) -> None:
    inputs = torch.randn(130, 2 * size, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([gated(inputs[row : row + 1]) for row in range(len(inputs))])
    for count in (2, 7, 40, 67, 100, 130):
        assert torch.equal(gated(inputs[:count]), alone[:count])
