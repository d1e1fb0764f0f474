"""Capture in the target's own forward: features are right, and logits are the same bits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_support import boot_engine, make_model, random_tokens, relative_error, save

from outrider.engine.boot import Engine
from outrider.engine.feature_projection import (
    FeatureProjection,
    load_projection,
    serialise_projection,
)
from outrider.engine.feature_tap import FeatureTap
from outrider.engine.runner import SequenceRows
from tests.processor import ENGINE_DTYPES

HIDDEN = 64
WIDTH = 64
LAYERS = (0, 3, 4)
NUM_TOKENS = 41


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    model = make_model("llama", num_hidden_layers=7)
    return model, save(model, tmp_path_factory.mktemp("layers"))


@pytest.fixture(scope="module", params=ENGINE_DTYPES)
def engine(request: pytest.FixtureRequest, checkpoint: tuple[object, Path]) -> Engine:
    return boot_engine(checkpoint[1], dtype=request.param, block_size=8)


def projection_for(engine: Engine, layer_ids: tuple[int, ...] = LAYERS) -> FeatureProjection:
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, len(layer_ids) * HIDDEN) / 8
    data = serialise_projection(
        {"fc.weight": weight}, layer_ids=layer_ids, row_dtype=torch.float16, rms_norm_eps=1e-5
    )
    return load_projection(data, hidden_size=HIDDEN, dtype=getattr(torch, engine.dtype))


def run(
    engine: Engine, tokens: list[int], cuts: list[int], tap: FeatureTap | None
) -> tuple[np.ndarray, np.ndarray]:
    """Logits and features of all tokens, computed in rows that end at the cuts."""
    blocks = engine.block_pool.allocate(-(-len(tokens) // engine.limits.block_size))
    logits = []
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        rows = SequenceRows(
            token_ids=tokens[start:end], start=start, block_table=blocks, num_logits=end - start
        )
        logits.append(engine.runner.forward([rows], tap))
    features = np.empty(0) if tap is None else tap.store.rows_of(blocks, 0, len(tokens))
    engine.block_pool.release(blocks)
    return np.concatenate(logits), features


def test_logits_are_the_same_bits_with_a_tap_and_without(engine: Engine) -> None:
    tokens = random_tokens(NUM_TOKENS)
    for cuts in ([], [20, 21, 22, 30]):
        plain, _ = run(engine, tokens, cuts, None)
        tapped, _ = run(engine, tokens, cuts, engine.runner.make_tap(projection_for(engine)))
        assert np.array_equal(plain, tapped)


def test_a_position_has_the_same_features_in_prefill_decode_and_verify_rows(
    engine: Engine,
) -> None:
    tokens = random_tokens(NUM_TOKENS)
    tap = engine.runner.make_tap(projection_for(engine))
    _, whole = run(engine, tokens, [], tap)
    for cuts in ([16, 32], [36, 37, 38, 39, 40], [30, 35], [1, 4]):
        _, found = run(engine, tokens, cuts, tap)
        assert np.array_equal(whole, found), cuts


def test_features_are_those_of_the_residual_stream_that_enters_the_layers(
    checkpoint: tuple[object, Path], engine: Engine
) -> None:
    model, _ = checkpoint
    tokens = random_tokens(NUM_TOKENS)
    projection = projection_for(engine)
    _, found = run(engine, tokens, [24, 30], engine.runner.make_tap(projection))
    with torch.inference_mode():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states  # type: ignore[operator]
    captured = torch.cat([states[layer][0] for layer in LAYERS], dim=1)
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, len(LAYERS) * HIDDEN) / 8
    wanted = (captured @ weight.T).numpy()
    tolerance = 2e-3 if engine.dtype == "float32" else 0.12
    assert relative_error(found.view(np.float16).astype(np.float32), wanted) < tolerance


def test_each_sequence_of_a_step_has_its_own_features_and_padding_has_none(
    engine: Engine,
) -> None:
    tap = engine.runner.make_tap(projection_for(engine, (2, 5)))
    first, second = random_tokens(13, seed=1), random_tokens(4, seed=2)
    _, wanted = run(engine, first, [], tap)
    _, wanted_second = run(engine, second, [], tap)
    tap = engine.runner.make_tap(projection_for(engine, (2, 5)))
    tables = [engine.block_pool.allocate(2), engine.block_pool.allocate(1)]
    engine.runner.forward(
        [
            SequenceRows(token_ids=tokens, start=0, block_table=table, num_logits=1)
            for tokens, table in zip((first, second), tables, strict=True)
        ],
        tap,
    )
    assert np.array_equal(tap.store.rows_of(tables[0], 0, 13), wanted)
    assert np.array_equal(tap.store.rows_of(tables[1], 0, 4), wanted_second)
    assert tap.store.valid_from(tables[0], 13) == tap.store.valid_from(tables[1], 4) == 0
    # The padding block, and what lies behind the second sequence's tokens.
    assert tap.store.valid_from([0], 8) == 8
    assert tap.store.valid_from(tables[1], 5) == 5
    for table in tables:
        engine.block_pool.release(table)
