"""Plain steps that are launched while the one before them runs draw what they would draw alone."""

from typing import Any

import numpy as np
import pytest
import torch

from outrider.engine.boot import Engine
from outrider.engine.feature_projection import serialise_projection
from outrider.engine.sampling import LogitsError, Sampling
from tests.engine.gpu.gpu_streams import GREEDY, Stream, prompt_of

pytestmark = pytest.mark.gpu

STEPS = 20
SAMPLINGS = [
    GREEDY,
    Sampling(temperature=0.8, seed=2**63 + 5),
    Sampling(temperature=1.0, seed=7, top_k=20, top_p=0.9, min_p=0.02),
]


def tap_of(engine: Engine, seed: int) -> Any:
    """One whose features are a few random directions of the captured streams."""
    width = engine.model_config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(64, len(engine.feature_layers) * width, generator=generator)
    return engine.steps.make_tap(
        serialise_projection(
            {"fc.weight": weight / 40},
            layer_ids=engine.feature_layers,
            row_dtype=torch.bfloat16,
            rms_norm_eps=1e-5,
        )
    )


def opened(engine: Engine) -> list[Stream]:
    return [Stream(engine, prompt_of(40 + 30 * seed, seed), 2 * STEPS) for seed in range(3)]


def features_of(tap: Any, stream: Stream, start: int) -> Any:
    return tap.store.rows_of(stream.table, start, len(stream.token_ids) - 1)


@pytest.mark.parametrize("with_features", [False, True], ids=["plain", "with features"])
def test_tokens_and_features_are_those_of_one_step_after_another(
    engine: Engine, with_features: bool
) -> None:
    """The second sequence leaves half-way, so that rows come from other places than they go to."""
    assert engine.ahead is not None
    taps = [tap_of(engine, 1) if with_features else None for _ in "ab"]
    alone = opened(engine)
    starts = [len(stream.token_ids) for stream in alone]
    for count in range(STEPS):
        kept = [0, 1, 2] if count < STEPS // 2 else [0, 2]
        steps = [alone[index].step([], SAMPLINGS[index]) for index in kept]
        for index, verdict in zip(
            kept, engine.steps.launch(steps, taps[0]).verdicts(), strict=True
        ):
            alone[index].token_ids.append(verdict.bonus_token_id)

    ahead = opened(engine)
    kept = [0, 1, 2]
    running = engine.steps.launch(
        [ahead[index].step([], SAMPLINGS[index]) for index in kept], taps[1]
    )
    for count in range(1, STEPS + 1):
        before, kept = kept, ([0, 1, 2] if count < STEPS // 2 else [0, 2])
        behind = None
        if count < STEPS:
            rows = [ahead[index].next_row(before.index(index), SAMPLINGS[index]) for index in kept]
            behind = engine.ahead.launch_next(rows, taps[1], after=running)
        for index, verdict in zip(before, running.verdicts(), strict=True):
            ahead[index].token_ids.append(verdict.bonus_token_id)
        if behind is not None:
            running = behind

    for index, (one, other) in enumerate(zip(alone, ahead, strict=True)):
        assert other.token_ids == one.token_ids, index
        assert len(one.token_ids) == starts[index] + (STEPS // 2 if index == 1 else STEPS)
        if with_features:
            wanted, found = (
                features_of(tap, stream, starts[index] - 1)
                for tap, stream in zip(taps, (one, other), strict=True)
                if tap is not None
            )
            assert np.array_equal(wanted, found) and wanted.any()
    for stream in (*alone, *ahead):
        stream.close()


def test_a_row_behind_one_without_a_token_runs_all_the_same(engine: Engine) -> None:
    """The embedding of token -1 would be an illegal access; the first step's verdict says it."""
    assert engine.ahead is not None
    stream = Stream(engine, prompt_of(20, 0), 8)
    cache = engine.steps.decoder.cache  # type: ignore[attr-defined]
    block = stream.table[0]
    cache.values[:, block] = float("nan")
    running = engine.steps.launch([stream.step([])], None)
    behind = engine.ahead.launch_next([stream.next_row(0)], None, after=running)
    with pytest.raises(LogitsError):
        running.verdicts()
    with pytest.raises(LogitsError):
        behind.verdicts()
    cache.values[:, block] = 0
    stream.close()
    again = Stream(engine, prompt_of(20, 0), 8)
    (verdict,) = engine.steps.launch([again.step([])], None).verdicts()
    assert verdict.bonus_token_id >= 0
    again.close()
