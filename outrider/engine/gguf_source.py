"""Tensors and ModelConfig from a GGUF file, dequantised by the `gguf` package.

llama.cpp stores the q and k rows of its `llama` architecture in adjacent pairs, and those of the
Qwen architectures as Hugging Face does.
"""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from outrider.engine.errors import CheckpointError, ConfigError
from outrider.engine.model_config import ModelConfig, check_model_config
from outrider.engine.rope import FrequencyFactors, LinearScaling, RopeScaling

# Mistral files carry the architecture `llama`.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
ROPE_FREQUENCIES = "rope_freqs.weight"

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_PATTERN = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
GLOBAL_PATTERN = re.compile(r"(\w+)\.(weight|bias)")


def hugging_face_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without a counterpart is kept."""
    if match := LAYER_PATTERN.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{int(layer)}.{LAYER_NAMES.get(part, part)}.{kind}"
    if match := GLOBAL_PATTERN.fullmatch(name):
        part, kind = match.groups()
        return f"{GLOBAL_NAMES.get(part, part)}.{kind}"
    return name


class GgufSource:
    """One GGUF file: its metadata by key and its tensors by Hugging Face name."""

    def __init__(self, path: Path, reader: gguf.GGUFReader) -> None:
        self.path = path
        self._reader = reader
        self._tensors = {
            hugging_face_name(tensor.name): tensor
            for tensor in reader.tensors
            if tensor.name != ROPE_FREQUENCIES
        }
        self.architecture = self.value("general.architecture")
        self.pairs_adjacent = self.architecture == "llama"

    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def load(self, name: str) -> torch.Tensor:
        return _dequantize(self.path, self._tensors[name])

    def value(self, key: str) -> Any:
        """A metadata value, or None where the file has no such key."""
        field = self._reader.get_field(key)
        return None if field is None else field.contents()

    def setting(self, key: str) -> Any:
        """A metadata value of the file's architecture, or None."""
        return self.value(f"{self.architecture}.{key}")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, outermost dimension first; raises CheckpointError if missing."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def rope_frequency_factors(self) -> tuple[float, ...] | None:
        for tensor in self._reader.tensors:
            if tensor.name == ROPE_FREQUENCIES:
                return tuple(_dequantize(self.path, tensor).flatten().tolist())
        return None


def open_gguf(path: Path) -> GgufSource:
    """Map a GGUF file; raises CheckpointError if it is none."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file")
    try:
        return GgufSource(path, gguf.GGUFReader(path))
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path}: not a readable GGUF file: {error}") from error


def read_gguf_config(source: GgufSource) -> ModelConfig:
    """The model that a GGUF file describes; raises ConfigError naming the metadata key."""
    if source.architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{source.path}: general.architecture is {source.architecture!r}: must be one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if (source.value("split.count") or 1) > 1:
        raise ConfigError(f"{source.path}: split.count is above 1: split GGUF is not supported")
    if source.setting("expert_count"):
        raise ConfigError(f"{source.path}: expert_count is set: experts are not supported")
    num_heads = _integer(source, "attention.head_count")
    hidden_size = _integer(source, "embedding_length")
    max_position_embeddings = _integer(source, "context_length")
    head_dim = _head_dim(source, hidden_size, num_heads)
    window = source.setting("attention.sliding_window")
    if window and window < max_position_embeddings:
        raise ConfigError(
            f"{source.path}: attention.sliding_window is {window}: a window below context_length, "
            f"which is {max_position_embeddings}, is not supported"
        )
    names = source.names()
    num_kv_heads = source.setting("attention.head_count_kv")
    return check_model_config(
        ModelConfig(
            family=source.architecture,
            vocab_size=source.shape("model.embed_tokens.weight")[0],
            hidden_size=hidden_size,
            intermediate_size=_integer(source, "feed_forward_length"),
            num_layers=_integer(source, "block_count"),
            num_heads=num_heads,
            num_kv_heads=(
                num_heads if num_kv_heads is None else _integer(source, "attention.head_count_kv")
            ),
            head_dim=head_dim,
            rms_norm_eps=_number(source, "attention.layer_norm_rms_epsilon", None),
            rope_theta=_number(source, "rope.freq_base", 10000.0),
            rope_scaling=_rope_scaling(source, head_dim),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings="lm_head.weight" not in names,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in names,
            attention_output_bias="model.layers.0.self_attn.o_proj.bias" in names,
            qk_norm=source.architecture == "qwen3",
            eos_token_ids=_eos_token_ids(source),
        )
    )


def _dequantize(path: Path, tensor: gguf.ReaderTensor) -> torch.Tensor:
    if tensor.tensor_type == gguf.GGMLQuantizationType.F64:
        return torch.from_numpy(np.array(tensor.data))
    try:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise CheckpointError(
            f"{path}: {tensor.name}: quantisation {tensor.tensor_type.name} is not one that the "
            "gguf package can undo"
        ) from error
    # The file's own pages are read-only; a writable copy is what torch expects.
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _integer(source: GgufSource, key: str) -> int:
    value = source.setting(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{source.path}: {key} is {value!r}: must be one integer")
    return value


def _number(source: GgufSource, key: str, default: float | None) -> float:
    value = source.setting(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{source.path}: {key} is {value!r}: must be a positive number")
    return float(value)


def _head_dim(source: GgufSource, hidden_size: int, num_heads: int) -> int:
    if source.setting("attention.key_length") is not None:
        head_dim = _integer(source, "attention.key_length")
    else:
        head_dim = hidden_size // num_heads if num_heads > 0 else 0
    for key in ("attention.value_length", "rope.dimension_count"):
        value = source.setting(key)
        if value is not None and value != head_dim:
            raise ConfigError(f"{source.path}: {key} is {value}: must be the head size {head_dim}")
    return head_dim


def _rope_scaling(source: GgufSource, head_dim: int) -> RopeScaling | None:
    kind = source.setting("rope.scaling.type") or "none"
    factor = source.setting("rope.scaling.factor") or source.setting("rope.scale_linear")
    factors = source.rope_frequency_factors()
    if kind not in ("none", "linear"):
        raise ConfigError(f"{source.path}: rope.scaling.type is {kind!r}: must be none or linear")
    is_linear = factor not in (None, 1.0) and kind == "linear"
    if factors is None:
        return LinearScaling(factor=float(factor)) if is_linear else None
    if is_linear:
        raise ConfigError(f"{source.path}: {ROPE_FREQUENCIES} together with linear scaling")
    if len(factors) != head_dim // 2 or not all(0 < value < float("inf") for value in factors):
        raise CheckpointError(
            f"{source.path}: {ROPE_FREQUENCIES}: must hold {head_dim // 2} positive numbers"
        )
    return FrequencyFactors(factors=factors)


def _eos_token_ids(source: GgufSource) -> tuple[int, ...]:
    values = (source.value(f"tokenizer.ggml.{key}") for key in EOS_KEYS)
    return tuple(sorted({int(value) for value in values if value is not None}))
