"""Row slices in which torch's elementwise CPU kernels treat every row alike.

A kernel handles the last few elements of a run with other instructions than the rest, and some
functions (SiLU, the complex product) then differ in the last bit. Where a run ends depends on how
torch divides the elements among threads; these slices make every run end at a row's end.
"""

import torch

# at::internal::GRAIN_SIZE: up to here a kernel stays on one thread, beyond it elements are divided
# evenly among as many threads as have this much work.
GRAIN_SIZE = 32768


def row_slices(num_rows: int, width: int) -> list[slice]:
    """Slices of [num_rows, width] whose rows are computed alike, whatever num_rows is."""
    if _ends_at_rows(num_rows, width):
        return [slice(0, num_rows)]
    step = max(1, GRAIN_SIZE // width)
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def _ends_at_rows(num_rows: int, width: int) -> bool:
    numel = num_rows * width
    if numel <= GRAIN_SIZE:
        return True
    tasks = min(torch.get_num_threads(), -(-numel // GRAIN_SIZE))
    return num_rows % tasks == 0
