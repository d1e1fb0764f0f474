"""Everything that can be wrong with a checkpoint is refused, and the tensor or setting is named."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_support import (
    boot_engine,
    engine_logits,
    make_model,
    random_tokens,
    reference_logits,
    relative_error,
    save,
)
from safetensors.torch import load_file, save_file

from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.hf_config import read_hf_config

Tensors = dict[str, torch.Tensor]
GATE = "model.layers.1.mlp.gate_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def with_tensors(directory: Path, change: Callable[[Tensors], None], **overrides: Any) -> Path:
    save(make_model("llama", **overrides), directory)
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def with_settings(directory: Path, family: str, changes: dict[str, Any]) -> Path:
    save(make_model(family), directory)
    settings = json.loads((directory / "config.json").read_text()) | changes
    settings = {name: value for name, value in settings.items() if value != "REMOVED"}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


def set_value(name: str, value: float) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name].view(-1)[3] = value

    return change


FAULTS: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(GATE), rf"{GATE} is missing"),
    "unexpected": (
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
        r"model\.layers\.0\.self_attn\.q_proj\.bias is not part of a llama model",
    ),
    "layer_beyond": (
        lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(96, 64)}),
        r"model\.layers\.2\.mlp\.up_proj\.weight is not part",
    ),
    "misshapen": (
        lambda t: t.update({GATE: t[GATE][:, :60].contiguous()}),
        rf"{GATE} has shape \[96, 60\]: must be \[96, 64\]",
    ),
    "transposed": (lambda t: t.update({GATE: t[GATE].T.contiguous()}), rf"{GATE} has shape"),
    "nan": (set_value(GATE, float("nan")), rf"{GATE} has values that are not finite"),
    "infinite": (set_value(NORM, float("inf")), rf"{NORM} has values that are not finite"),
    "zero": (lambda t: t[GATE].zero_(), rf"{GATE} is all zero"),
    "zero_norm": (lambda t: t[NORM].zero_(), rf"{NORM} is all zero"),
    "integers": (lambda t: t.update({GATE: t[GATE].to(torch.int8)}), rf"{GATE}: dtype is"),
    "no_head": (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight is missing"),
    "nan_head": (set_value("lm_head.weight", float("nan")), r"lm_head\.weight has values"),
    "nan_embedding": (
        set_value("model.embed_tokens.weight", float("nan")),
        r"model\.embed_tokens\.weight has values",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_tensor_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    change, words = FAULTS[fault]
    with pytest.raises(CheckpointError, match=words):
        boot_engine(with_tensors(tmp_path, change))


def test_every_tensor_of_a_model_is_needed(tmp_path: Path) -> None:
    save(make_model("qwen3", head_dim=32, num_hidden_layers=1), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        rest = {other: tensor for other, tensor in tensors.items() if other != name}
        save_file(rest, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=f"{name} is missing"):
            boot_engine(tmp_path)


def test_a_value_beyond_the_dtype_is_refused_by_name(tmp_path: Path) -> None:
    model = make_model("llama").double()
    model.model.layers[1].mlp.gate_proj.weight.data[0, 0] = 1e300
    with pytest.raises(CheckpointError, match=f"{GATE} has values that are not finite in"):
        boot_engine(save(model, tmp_path))


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    path = with_tensors(tmp_path, lambda t: t.update({name: torch.zeros(8)}))
    assert boot_engine(path).first_decode.token_ids


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    def same(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    def other(tensors: Tensors) -> None:
        same(tensors)
        tensors["lm_head.weight"][5, 5] += 1.0

    model = make_model("llama", tie_word_embeddings=True)
    engine = boot_engine(with_tensors(tmp_path / "same", same, tie_word_embeddings=True))
    token_ids = random_tokens(20)
    found = engine_logits(engine, token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        boot_engine(with_tensors(tmp_path / "other", other, tie_word_embeddings=True))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "family": ("llama", {"model_type": "gpt2"}, "model_type is 'gpt2'"),
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "mlp_bias": ("llama", {"mlp_bias": True}, "mlp_bias is true"),
    "quantised": ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "classifier": ("llama", {"architectures": ["LlamaForX"]}, "LlamaForX"),
    "yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        "'yarn'",
    ),
    "old_dynamic": (
        "llama",
        {"rope_parameters": "REMOVED", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "'dynamic'",
    ),
    "partial": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "mistral_window": ("mistral", {"sliding_window": 128}, "sliding_window is 128"),
    "qwen_window": (
        "qwen2",
        {"sliding_window": 128, "use_sliding_window": True},
        "sliding_window is 128",
    ),
    "no_head_dim": ("qwen3", {"head_dim": "REMOVED"}, "head_dim is None"),
    "heads": ("llama", {"num_key_value_heads": 3}, "num_heads is 4"),
    "text": ("llama", {"hidden_size": "64"}, "hidden_size is '64'"),
    "zero": ("llama", {"num_hidden_layers": 0}, "num_layers is 0"),
    "eos": ("llama", {"eos_token_id": 9999}, "9999 is outside"),
    "eos_text": ("llama", {"eos_token_id": ["x"]}, "eos_token_id"),
    "epsilon": ("llama", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unsupported_setting_is_refused_by_name(case: str, tmp_path: Path) -> None:
    family, changes, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        read_hf_config(with_settings(tmp_path, family, changes))


SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen_window_off": ("qwen2", {"sliding_window": 128, "use_sliding_window": False}),
    "mistral_window_as_long_as_the_model": ("mistral", {"sliding_window": 1024}),
    "llama_has_no_window": ("llama", {"sliding_window": 16}),
}


@pytest.mark.parametrize("case", SERVED)
def test_an_inactive_sliding_window_is_served(case: str, tmp_path: Path) -> None:
    family, changes = SERVED[case]
    assert read_hf_config(with_settings(tmp_path, family, changes)).family == family


def test_the_older_names_of_rope_settings_are_read(tmp_path: Path) -> None:
    old = {
        "rope_parameters": "REMOVED",
        "rope_theta": 500000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    config = read_hf_config(with_settings(tmp_path, "llama", old))
    assert config.rope_theta == 500000.0
    assert "factor=2.0" in repr(config.rope_scaling)


def test_end_tokens_are_the_union_of_both_files(tmp_path: Path) -> None:
    path = with_settings(tmp_path, "llama", {"eos_token_id": [5, 2]})
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert read_hf_config(path).eos_token_ids == (2, 5, 9)


def test_missing_and_broken_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a directory"):
        boot_engine(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        boot_engine(tmp_path)
    save(make_model("llama"), tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        boot_engine(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"0 \*\.safetensors files"):
        boot_engine(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        boot_engine(tmp_path)


def test_a_missing_shard_or_a_wrong_index_is_refused_by_name(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="50KB")
    index_path = tmp_path / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    shard = index["weight_map"][GATE]
    data = (tmp_path / shard).read_bytes()
    (tmp_path / shard).unlink()
    with pytest.raises(CheckpointError, match=shard):
        boot_engine(tmp_path)
    (tmp_path / shard).write_bytes(data)
    boot_engine(tmp_path)
    del index["weight_map"][GATE]
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{GATE} is not placed there"):
        boot_engine(tmp_path)
    index["weight_map"] |= {GATE: shard, "model.layers.9.x": shard}
    index_path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.x is missing"):
        boot_engine(tmp_path)
