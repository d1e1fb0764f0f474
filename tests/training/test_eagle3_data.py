"""Shards read back as written, and batches that hold every row once, in a repeatable order."""

from pathlib import Path

import numpy as np
import pytest
import torch
from eagle3_support import one_batch, random_rows

from training.batches import plan_epoch
from training.data import DataError, Row, RowSet, shard_paths, write_rows


def test_rows_read_back_as_written_over_several_shards(tmp_path: Path) -> None:
    write_rows(tmp_path / "b.safetensors", [Row([70_000, 1], 1)])
    assert write_rows(tmp_path / "a.safetensors", [Row([5, 6, 7], 2), Row([8], 0)]) == 4
    rows = RowSet.load(shard_paths(tmp_path))
    assert [rows.row(index).tokens.tolist() for index in range(3)] == [[5, 6, 7], [8], [70_000, 1]]
    assert [rows.row(index).answer_start for index in range(3)] == [2, 0, 1]
    assert rows.answer_mask().tolist() == [False, False, True, True, False, True]
    assert rows.answer_token_count == 3
    chosen = rows.select([2, 0])
    assert chosen.tokens.tolist() == [70_000, 1, 5, 6, 7]
    assert chosen.answer_starts.tolist() == [1, 2]


def test_small_ids_are_stored_in_sixteen_bits(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.safetensors", [Row(range(10_000), 0)])
    assert (tmp_path / "a.safetensors").stat().st_size < 21_000


@pytest.mark.parametrize(
    ("row", "text"),
    [(Row([1, 2], 3), "answer_start is 3"), (Row([1, -2], 0), "-2 is negative"), (None, "no rows")],
)
def test_impossible_rows_are_refused(tmp_path: Path, row: Row | None, text: str) -> None:
    with pytest.raises(DataError, match=text):
        write_rows(tmp_path / "a.safetensors", [] if row is None else [row])
    assert list(tmp_path.iterdir()) == []


def test_broken_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no"):
        shard_paths(tmp_path)
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"not a shard")
    with pytest.raises(DataError, match=r"a\.safetensors: cannot be read"):
        RowSet.load([path])


def test_every_row_is_in_one_batch_of_its_width() -> None:
    lengths = np.asarray([5, 64, 65, 130, 700, 20, 3000, 128], dtype=np.int64)
    plan = plan_epoch(lengths, tokens_per_batch=256, max_length=512, seed=1, epoch=0)
    assert sorted(int(row) for batch in plan for row in batch.rows) == list(range(8))
    for batch in plan:
        assert batch.width % 64 == 0
        assert batch.width >= min(512, int(lengths[batch.rows].max()))
        assert len(batch.rows) * batch.width <= max(256, batch.width)


def test_order_follows_from_seed_and_epoch() -> None:
    lengths = np.full(100, 60, dtype=np.int64)

    def order(seed: int, epoch: int) -> list[int]:
        plan = plan_epoch(lengths, tokens_per_batch=64, max_length=64, seed=seed, epoch=epoch)
        return [int(batch.rows[0]) for batch in plan]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_chains_are_the_positions_that_predict_an_answer_token() -> None:
    rows = random_rows([9, 6, 3], [4, 0, 3])
    order, batch = one_batch(rows)
    width = batch.tokens.shape[1]
    found = {}
    for chain, length in zip(batch.chains.tolist(), batch.chain_lengths.tolist(), strict=True):
        found.setdefault(int(order[chain // width]), []).append((chain % width, length))
    # Row 2 is all prompt; row 0's first answer token stands at 4, so its first chain is 2.
    assert found == {
        0: [(2, 5), (3, 4), (4, 3), (5, 2), (6, 1)],
        1: [(0, 4), (1, 3), (2, 2), (3, 1)],
    }
    for place, index in enumerate(order):
        row = torch.as_tensor(rows.row(int(index)).tokens)
        assert batch.tokens[place, : len(row)].tolist() == row.tolist()
        assert not batch.tokens[place, len(row) :].any()
    assert batch.token_count == 18
