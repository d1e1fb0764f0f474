"""Packed little-endian columns: one `bytes` field holds one number per row.

Knows nothing of what the columns mean.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.generic]


class MalformedColumn(ValueError):
    """A column's length does not fit its type or the number of rows."""


def pack(values: Sequence[int] | npt.NDArray[np.generic], dtype: str) -> bytes:
    """Packs numbers; `dtype` is a numpy type with its byte order, for example '<u4'."""
    return np.asarray(values, dtype=dtype).tobytes()


def unpack(name: str, data: bytes, dtype: str, count: int | None = None) -> list[int]:
    """The numbers of a column. Raises MalformedColumn if it is ragged or not `count` long."""
    size = np.dtype(dtype).itemsize
    if len(data) % size or (count is not None and len(data) != count * size):
        expected = f"{count} numbers" if count is not None else "whole numbers"
        raise MalformedColumn(f"{name} has {len(data)} bytes, must hold {expected} of {size} bytes")
    return np.frombuffer(data, dtype=dtype).tolist()  # type: ignore[no-any-return]


def split(name: str, values: Sequence[int], counts: Sequence[int]) -> list[Sequence[int]]:
    """Cuts a ragged column into its rows. Raises MalformedColumn if the counts do not add up."""
    if sum(counts) != len(values):
        raise MalformedColumn(
            f"{name} has {len(values)} numbers, its counts add up to {sum(counts)}"
        )
    rows = []
    start = 0
    for count in counts:
        rows.append(values[start : start + count])
        start += count
    return rows
