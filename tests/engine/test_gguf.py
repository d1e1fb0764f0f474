"""GGUF files: written here by gguf's own writer, and the default model, against transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from engine_support import (
    LLAMA3_SCALING,
    boot_engine,
    default_model_path,
    engine_logits,
    make_model,
    random_tokens,
    reference_logits,
    relative_error,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.gguf_source import hugging_face_name, open_gguf, read_gguf_config

# Every row length is a multiple of 256, so that all quantisations have whole blocks.
QUANTISABLE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
ROUND_TRIPS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "TQ1_0", "TQ2_0")
LAYER_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
Metadata = Callable[[gguf.GGUFWriter], None]


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_PARTS[part]}.{kind}"


def interleaved(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the q and k rows of its llama architecture."""
    half = tensor.shape[0] // num_heads // 2
    rows = [
        head * 2 * half + part * half + index
        for head in range(num_heads)
        for index in range(half)
        for part in range(2)
    ]
    return tensor[rows]


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quantisation: str = "F32",
    more: Metadata = lambda writer: None,
    tensors: dict[str, np.ndarray] | None = None,
    leave_out: str = "",
) -> dict[str, torch.Tensor]:
    """Write a model; returns what its tensors are once dequantised, under their own names."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(7)
    more(writer)
    kind = gguf.GGMLQuantizationType[quantisation]
    stored = {}
    for name, parameter in model.state_dict().items():
        values = parameter.float().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
            values = interleaved(values, getattr(config, heads))
            source = interleaved(np.arange(len(values)), getattr(config, heads))
        else:
            source = np.arange(len(values))
        is_tied = name == "lm_head.weight" and config.tie_word_embeddings
        if is_tied or gguf_name(name) == leave_out:
            continue
        if values.ndim == 1:
            writer.add_tensor(gguf_name(name), values)
            dequantised = values
        else:
            data = gguf.quants.quantize(values, kind)
            writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
            dequantised = gguf.quants.dequantize(data, kind)
        original = np.empty_like(dequantised)
        original[source] = dequantised
        stored[name] = torch.from_numpy(original)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return stored


@pytest.mark.parametrize("quantisation", ROUND_TRIPS)
def test_a_llama_file_of_every_writable_quantisation_gives_the_reference_logits(
    quantisation: str, tmp_path: Path
) -> None:
    model = make_model("llama", **QUANTISABLE)
    stored = write_gguf(tmp_path / "model.gguf", model, quantisation)
    model.load_state_dict(stored)
    token_ids = random_tokens(50)
    found = engine_logits(boot_engine(tmp_path / "model.gguf"), token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_every_architecture_gives_the_reference_logits(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    model = make_model(family, **overrides)
    write_gguf(tmp_path / "model.gguf", model)
    engine = boot_engine(tmp_path / "model.gguf")
    token_ids = random_tokens(300)
    found = engine_logits(engine, token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4
    assert engine.model_config.family == family
    assert engine.model_config.eos_token_ids == (2, 7)


def test_rope_frequency_factors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    model = make_model("llama", rope_parameters=LLAMA3_SCALING)
    plain = LLAMA3_SCALING["rope_theta"] ** -(np.arange(0, 16, 2) / model.config.head_dim)
    factors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert len(set(factors.tolist())) > 2
    write_gguf(tmp_path / "model.gguf", model, tensors={"rope_freqs.weight": factors})
    token_ids = random_tokens(600)
    found = engine_logits(boot_engine(tmp_path / "model.gguf"), token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4


def test_linear_rope_scaling_of_a_file_is_honoured(tmp_path: Path) -> None:
    def scaled(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    model = make_model("llama", rope_parameters=parameters)
    write_gguf(tmp_path / "model.gguf", model, more=scaled)
    token_ids = random_tokens(300)
    found = engine_logits(boot_engine(tmp_path / "model.gguf"), token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4


def test_the_default_model_gives_the_logits_of_transformers() -> None:
    reader = gguf.GGUFReader(default_model_path())
    state = {}
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=8192,
        rms_norm_eps=1e-5, tie_word_embeddings=True, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    for name in model.state_dict():
        if name == "lm_head.weight":
            continue
        tensor = by_name[gguf_name(name)]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if "q_proj" in name or "k_proj" in name:
            original = np.empty_like(values)
            original[interleaved(np.arange(len(values)), 9 if "q_proj" in name else 3)] = values
            values = original
        state[name] = torch.from_numpy(np.array(values))
    model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    half = torch.arange(0, 64, 2, dtype=torch.float32) / 64
    model.model.rotary_emb.inv_freq = 100000.0**-half
    model.eval()
    engine = boot_engine(default_model_path(), kv_cache_bytes=64 << 20)
    token_ids = random_tokens(150, vocab_size=49152)
    found = engine_logits(engine, token_ids)
    assert relative_error(found, reference_logits(model, token_ids)) < 1e-4
    assert engine.model_config.eos_token_ids == (2,)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda w: w.add_expert_count(8), "expert_count"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "yarn"),
        (lambda w: w.add_sliding_window(64), "sliding_window is 64"),
        (lambda w: w.add_rope_dimension_count(8), "rope.dimension_count is 8"),
        (lambda w: w.add_uint16("split.count", 2), "split.count"),
    ],
)
def test_what_a_file_asks_for_and_the_engine_lacks_is_refused_by_name(
    more: Metadata, words: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama"), more=more)
    with pytest.raises(ConfigError, match=words):
        read_gguf_config(open_gguf(tmp_path / "model.gguf"))


def test_a_sliding_window_as_long_as_the_context_is_served(tmp_path: Path) -> None:
    write_gguf(
        tmp_path / "model.gguf", make_model("llama"), more=lambda w: w.add_sliding_window(1024)
    )
    assert read_gguf_config(open_gguf(tmp_path / "model.gguf")).max_position_embeddings == 1024


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.add_tensor("token_embd.weight", np.ones((4, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="gpt2"):
        read_gguf_config(open_gguf(tmp_path / "model.gguf"))


def test_a_file_that_is_no_gguf_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to be read as a header" * 4)
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_gguf(path)
    with pytest.raises(CheckpointError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama"))
    data = (tmp_path / "model.gguf").read_bytes()
    for length in (3, 20, 300, len(data) // 2, len(data) - 100):
        (tmp_path / "cut.gguf").write_bytes(data[:length])
        with pytest.raises(CheckpointError):
            open_gguf(tmp_path / "cut.gguf")


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    extra = {"blk.0.extra.weight": np.ones(4, dtype=np.float32)}
    write_gguf(tmp_path / "model.gguf", make_model("llama"), tensors=extra)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.extra\.weight"):
        boot_engine(tmp_path / "model.gguf")


@pytest.mark.parametrize("name", ["blk.1.attn_k.weight", "token_embd.weight", "output_norm.weight"])
def test_a_missing_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", make_model("llama"), leave_out=name)
    with pytest.raises(CheckpointError, match="is missing") as caught:
        boot_engine(tmp_path / "model.gguf")
    assert hugging_face_name(name) in str(caught.value)


@pytest.mark.parametrize("quantisation", [kind.name for kind in gguf.quants._type_traits])
def test_every_quantisation_that_gguf_can_undo_is_read(quantisation: str, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType[quantisation]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(1).integers(
        0, 48, (3, 256 // block * size), dtype=np.uint8
    )  # no scale is infinite
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_gguf(tmp_path / "model.gguf").load("model.layers.0.mlp.up_proj.weight")
    assert found.shape == (3, 256)
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(data, kind))
