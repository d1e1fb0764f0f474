"""Logits of every family against transformers' own implementation, in float32."""

from pathlib import Path

import pytest
from engine_support import (
    LLAMA3_SCALING,
    boot_engine,
    engine_logits,
    make_model,
    random_tokens,
    reference_logits,
    relative_error,
    save,
)

from tests.processor import NEEDS_BFLOAT16

CASES = {
    "llama_untied": ("llama", {}),
    "smollm_tied": (
        "llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "hidden_size": 144,
        },
    ),
    "llama_without_grouping": ("llama", {"num_key_value_heads": 4}),
    "llama_attention_bias": ("llama", {"attention_bias": True}),
    "llama3_scaling": ("llama", {"rope_parameters": LLAMA3_SCALING}),
    "linear_scaling": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    ),
    "llama_odd_head_dim": ("llama", {"head_dim": 24}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_head_dim": ("mistral", {"sliding_window": 4096, "head_dim": 32}),
    "qwen2_bias": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2_tied_seven_per_group": (
        "qwen2",
        {"tie_word_embeddings": True, "num_attention_heads": 14, "hidden_size": 112},
    ),
    "qwen3_qk_norm": ("qwen3", {"head_dim": 32}),
    "qwen3_bias": ("qwen3", {"head_dim": 48, "attention_bias": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    family, overrides = CASES[case]
    model = make_model(family, **overrides)
    engine = boot_engine(save(model, tmp_path))
    token_ids = random_tokens(600)  # beyond two chunks of keys
    found = engine_logits(engine, token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4


def test_sharded_checkpoints_give_the_same_logits(tmp_path: Path) -> None:
    model = make_model("llama")
    whole = boot_engine(save(model, tmp_path / "whole"))
    sharded_path = save(model, tmp_path / "sharded", max_shard_size="50KB")
    assert len(list(sharded_path.glob("*.safetensors"))) > 2
    sharded = boot_engine(sharded_path)
    token_ids = random_tokens(40)
    assert (engine_logits(whole, token_ids) == engine_logits(sharded, token_ids)).all()
    assert whole.fingerprint == sharded.fingerprint


@NEEDS_BFLOAT16
def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    model = make_model("qwen3", head_dim=32, initializer_range=0.05)
    engine = boot_engine(save(model, tmp_path), dtype="bfloat16")
    token_ids = random_tokens(300)
    found = engine_logits(engine, token_ids)
    assert 0 < relative_error(found, reference_logits(model, token_ids)) < 3e-2


@NEEDS_BFLOAT16
def test_fingerprints_tell_checkpoints_apart(tmp_path: Path) -> None:
    model = make_model("llama")
    first = boot_engine(save(model, tmp_path / "first"))
    model.model.layers[1].mlp.up_proj.weight.data *= 1.001
    second = boot_engine(save(model, tmp_path / "second"))
    again = boot_engine(tmp_path / "first", dtype="bfloat16")
    assert first.fingerprint != second.fingerprint
    assert first.fingerprint == again.fingerprint
