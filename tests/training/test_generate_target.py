"""The dense target gives the engine's numbers and its layers' tensors as checkpoints hold them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.engine.engine_support import (
    LLAMA3_SCALING,
    boot_engine,
    default_model_path,
    engine_logits,
    make_model,
    random_tokens,
    relative_error,
    save,
)
from training.target import DenseTarget, load_target

FAMILIES = [
    ("llama", {"rope_scaling": LLAMA3_SCALING, "tie_word_embeddings": True}),
    ("mistral", {"tie_word_embeddings": False}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
]


def logits(target: DenseTarget, token_ids: list[int]) -> np.ndarray:
    _, final = target(torch.tensor([token_ids]), ())
    return (final[0] @ target.head.T).numpy()


@pytest.mark.parametrize(("family", "overrides"), FAMILIES)
def test_every_family_gives_the_engines_logits(
    tmp_path: Path, family: str, overrides: dict[str, object]
) -> None:
    path = save(make_model(family, **overrides), tmp_path)
    token_ids = random_tokens(150)
    wanted = engine_logits(boot_engine(path), token_ids)
    assert relative_error(logits(load_target(path), token_ids), wanted) < 1e-4


@pytest.mark.full
def test_the_default_model_gives_the_engines_logits() -> None:
    path = default_model_path()
    token_ids = random_tokens(40, vocab_size=49152)
    engine = boot_engine(path, kv_cache_bytes=64 << 20)
    wanted = engine_logits(engine, token_ids)
    assert relative_error(logits(load_target(path), token_ids), wanted) < 1e-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_layers_tensors_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    model = make_model(family)
    target = load_target(save(model, tmp_path))
    state = target.layer_state(1)
    wanted = dict(model.model.layers[1].state_dict())
    assert state.keys() == wanted.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, wanted[name]), name


def test_features_are_the_residual_stream_entering_the_layers(tmp_path: Path) -> None:
    model = make_model("llama", num_hidden_layers=4)
    target = load_target(save(model, tmp_path))
    token_ids = torch.tensor([random_tokens(20, seed=1), random_tokens(20, seed=2)])
    features, final = target(token_ids, (3, 1))
    with torch.inference_mode():
        states = model.model(token_ids, output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat((states[3], states[1]), -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(final, states[-1], rtol=0, atol=1e-4)


def test_what_the_target_does_not_have_is_refused(tmp_path: Path) -> None:
    target = load_target(save(make_model("llama"), tmp_path))
    with pytest.raises(ValueError, match="layer 2: must be from 0 to 1"):
        target(torch.zeros(1, 4, dtype=torch.long), (2,))
    with pytest.raises(ValueError, match="length is 1025: must be at most 1024"):
        target(torch.zeros(1, 1025, dtype=torch.long), (0,))
