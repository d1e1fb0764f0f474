"""A sequence's rows give the same bits alone and among others, in any mix and any chunking."""

import numpy as np
import pytest
from engine_support import boot_engine, make_model, random_tokens, run_rows, save

from outrider.engine.boot import Engine
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
