"""A sequence's rows give the same bits alone and among others, in any mix and any chunking."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import (
    RecordingReport,
    boot_engine,
    make_model,
    random_tokens,
    run_rows,
    save,
)

from outrider.engine import layers
from outrider.engine.boot import Engine, boot
from outrider.engine.config import EngineConfig
from outrider.engine.errors import InvarianceError
from outrider.engine.invariance import RowRule
from outrider.engine.runner import SequenceRows
from tests.processor import NEEDS_BFLOAT16

MODELS = {
    "group_of_three": (
        "llama",
        {
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 144,
            "intermediate_size": 200,
        },
    ),
    "group_of_seven": ("qwen2", {"num_attention_heads": 14, "hidden_size": 112}),
    "qk_norm": ("qwen3", {"head_dim": 24}),
    "one_head": (
        "llama",
        {
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "hidden_size": 64,
            "intermediate_size": 1000,
        },
    ),
}


@pytest.fixture(
    params=[
        pytest.param((name, dtype), marks=NEEDS_BFLOAT16 if dtype == "bfloat16" else ())
        for name in MODELS
        for dtype in ("float32", "bfloat16")
    ],
    ids=lambda value: "-".join(value),
    scope="module",
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    name, dtype = request.param
    family, overrides = MODELS[name]
    path = save(make_model(family, **overrides), tmp_path_factory.mktemp(name))
    return boot_engine(path, dtype=dtype, block_size=16, kv_cache_bytes=24 << 20)


def test_a_ragged_step_gives_every_sequence_its_own_bits(engine: Engine) -> None:
    rng = np.random.default_rng(7)
    runner, pool = engine.runner, engine.block_pool
    for _ in range(6):
        histories = [
            random_tokens(int(rng.integers(1, 700)), seed=int(rng.integers(1 << 30)))
            for _ in range(int(rng.integers(2, 9)))
        ]
        tables = [pool.allocate(-(-len(history) // 16)) for history in histories]
        # Interleave ownership so that no table is a run of neighbours.
        last_rows = [
            min(len(history), int(rng.choice([1, 2, 5, 9, 40, 120]))) for history in histories
        ]
        batch = []
        wanted = []
        for history, table, count in zip(histories, tables, last_rows, strict=True):
            wanted.append(one_by_one(engine, history, table)[-count:])
            batch.append(
                SequenceRows(
                    token_ids=history[-count:],
                    start=len(history) - count,
                    block_table=table,
                    num_logits=count,
                )
            )
        if sum(last_rows) <= runner.max_step_rows:
            found = runner.forward(batch)
            assert np.array_equal(found, np.concatenate(wanted))
        for table in tables:
            pool.release(table)


def test_any_chunking_of_a_prompt_gives_the_same_bits(engine: Engine) -> None:
    rng = np.random.default_rng(8)
    history = random_tokens(620, seed=3)
    table = engine.block_pool.allocate(-(-len(history) // 16))
    wanted = one_by_one(engine, history, table)
    for _ in range(3):
        found = []
        start = 0
        while start < len(history):
            count = min(int(rng.integers(1, 300)), len(history) - start)
            chunk = history[start : start + count]
            found.append(run_rows(engine.runner, table, chunk, start, count))
            start += count
        assert np.array_equal(np.concatenate(found), wanted)
    engine.block_pool.release(table)


def one_by_one(engine: Engine, history: list[int], table: list[int]) -> np.ndarray:
    """Prefill in two fixed chunks, then the last rows one at a time."""
    tail = min(len(history), 5)
    head = len(history) - tail
    parts = []
    for start in range(0, head, 400):
        chunk = history[start : min(start + 400, head)]
        parts.append(run_rows(engine.runner, table, chunk, start, len(chunk)))
    for position in range(head, len(history)):
        parts.append(run_rows(engine.runner, table, history[position : position + 1], position, 1))
    return np.concatenate(parts)


# Row counts whose rows a processor computes alike, by columns of the product, as measured on an
# Intel Xeon with AMX (torch 2.11, two threads): a count has the class of the last bound up to it.
XEON = {
    "float32": {"gate_up": (16, 88)},
    "bfloat16": {"qkv": (24, 512), "gate_up": (24,), "down": (24, 32, 200, 352)},
}


@pytest.mark.parametrize(
    ("bounds", "rule"),
    [
        ({}, RowRule(multiple=2, max_rows=0)),
        ({"down": (8,)}, RowRule(multiple=8, max_rows=0)),
        (XEON["float32"], RowRule(multiple=16, max_rows=64)),
        (XEON["bfloat16"], RowRule(multiple=32, max_rows=128)),
    ],
    ids=["alike", "from 8 rows on", "Xeon, float32", "Xeon, bfloat16"],
)
def test_rows_are_alike_on_processors_that_compute_many_otherwise(
    bounds: dict[str, tuple[int, ...]],
    rule: RowRule,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = save(make_model("llama", num_hidden_layers=2), tmp_path)
    columns = product_columns(path)
    pretend_processor(monkeypatch, {columns[name]: bound for name, bound in bounds.items()})
    report = RecordingReport()
    config = EngineConfig(
        model_path=path, dtype="float32", kv_cache_bytes=24 << 20, block_size=16, max_step_rows=512
    )
    engine = boot(config, report)
    assert engine.runner.row_multiple == rule.multiple
    (note,) = [note for stage, note in report.notes if stage == "attention"]
    assert note.startswith(rule.words() + "; ")
    history = random_tokens(450, seed=5)
    table = engine.block_pool.allocate(-(-len(history) // 16))
    whole = run_rows(engine.runner, table, history, 0, len(history))
    assert np.array_equal(whole[-5:], one_by_one(engine, history, table)[-5:])


def test_a_processor_that_treats_every_count_otherwise_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(make_model("llama", num_hidden_layers=2), tmp_path)
    columns = product_columns(path)
    pretend_processor(monkeypatch, {columns["output"]: tuple(range(1, 600))})
    with pytest.raises(InvarianceError, match=r"output product: rows of \[32, .*\] differ"):
        boot_engine(path)


def product_columns(path: Path) -> dict[str, tuple[int, int]]:
    """(in, out) of every product of a model's layers."""
    config = json.loads((path / "config.json").read_text())
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "qkv": (width, queries + 2 * keys),
        "output": (queries, width),
        "gate_up": (width, 2 * inner),
        "down": (inner, width),
    }


def pretend_processor(
    monkeypatch: pytest.MonkeyPatch, bounds: dict[tuple[int, int], tuple[int, ...]]
) -> None:
    """Products whose last bits depend on the class of their number of rows."""
    own = layers.product

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        # Eight rows at a time are alike on any machine: what differs is what is added here.
        padded = torch.cat((x, x.new_zeros(-len(x) % 8, x.shape[1])))
        output = torch.cat([own(piece, weight, bias) for piece in padded.split(8)])[: len(x)]
        kind = sum(len(x) >= bound for bound in bounds.get((x.shape[1], output.shape[1]), ()))
        return output * (1 + kind * 2.0**-20)

    monkeypatch.setattr(layers, "product", product)
