"""Features beside the KV cache: where they lie, and which of them are a sequence's own."""

import numpy as np
import pytest

from outrider.engine.config import resolve_feature_layers
from outrider.engine.errors import ConfigError
from outrider.engine.feature_store import FeatureStore

BLOCK_SIZE = 8
WIDTH = 3


def store() -> FeatureStore:
    return FeatureStore(num_blocks=16, block_size=BLOCK_SIZE, width=WIDTH)


def slots(table: list[int], start: int, end: int) -> np.ndarray:
    return np.array([table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                     for at in range(start, end)], dtype=np.int64)  # fmt: skip


def rows(start: int, end: int, salt: int = 0) -> np.ndarray:
    return (np.arange(start, end)[:, None] * 10 + np.arange(WIDTH) + salt).astype(np.uint16)


@pytest.mark.parametrize(("start", "end"), [(0, 20), (3, 5), (6, 10), (8, 16), (15, 16), (7, 20)])
def test_rows_come_back_in_the_order_of_positions(start: int, end: int) -> None:
    kept, table = store(), [5, 2, 9]
    kept.write(slots(table, 0, 20), rows(0, 20))
    assert np.array_equal(kept.rows_of(table, start, end), rows(start, end))


def test_a_copy_is_given_out_that_later_writes_do_not_change() -> None:
    kept, table = store(), [5, 2]
    kept.write(slots(table, 0, 12), rows(0, 12))
    within, across = kept.rows_of(table, 1, 3), kept.rows_of(table, 6, 10)
    kept.write(slots(table, 0, 12), rows(0, 12, salt=500))
    assert np.array_equal(within, rows(1, 3))
    assert np.array_equal(across, rows(6, 10))


@pytest.mark.parametrize(("written", "length", "valid_from"), [
    ((0, 20), 20, 0), ((7, 20), 20, 7), ((0, 10), 20, 20), ((8, 20), 13, 8), ((0, 0), 5, 5),
    ((0, 0), 0, 0),
])  # fmt: skip
def test_features_are_valid_behind_the_last_one_that_was_never_written(
    written: tuple[int, int], length: int, valid_from: int
) -> None:
    kept, table = store(), [5, 2, 9]
    kept.write(slots(table, *written), rows(*written))
    assert kept.valid_from(table, length) == valid_from


@pytest.mark.parametrize(("num_layers", "wanted"), [
    (30, (2, 15, 27)), (32, (2, 16, 29)), (7, (2, 3, 4)), (6, (2, 3)), (5, (2,)), (4, (1, 2)),
    (3, (0, 1, 2)), (2, (1,)), (1, (0,)),
])  # fmt: skip
def test_the_usual_layers_are_those_that_a_model_has(
    num_layers: int, wanted: tuple[int, ...]
) -> None:
    assert resolve_feature_layers((), num_layers) == wanted


def test_named_layers_are_kept_to_and_one_too_many_is_refused_by_name() -> None:
    assert resolve_feature_layers((0, 5, 3), 6) == (0, 3, 5)
    with pytest.raises(ConfigError, match="names layer 6: must be below 6"):
        resolve_feature_layers((0, 6), 6)
