"""Small random EAGLE-3 heads in the published layouts, and a target for them without files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.engine.model_config import ModelConfig

VOCAB_SIZE = 96
DRAFT_VOCAB_SIZE = 40
HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 48
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
NUM_LAYERS = 8
MAX_SEQUENCE_LENGTH = 400
# Of the head: far below the lengths that it serves.
TRAINED_LENGTH = 16
EPS = 1e-5
EOS_TOKEN_ID = 95

LAYER_SETTINGS: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": TRAINED_LENGTH,
    "rms_norm_eps": EPS,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


def target_config(**overrides: object) -> ModelConfig:
    settings: dict[str, object] = {
        "family": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_layers": NUM_LAYERS,
        "num_heads": 4,
        "num_kv_heads": 4,
        "head_dim": 8,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": MAX_SEQUENCE_LENGTH,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_output_bias": False,
        "qk_norm": False,
        "eos_token_ids": (EOS_TOKEN_ID,),
    }
    return ModelConfig(**(settings | overrides))


@dataclass
class MemorySource:
    """In place of a target's checkpoint."""

    tensors: dict[str, torch.Tensor]
    pairs_adjacent: bool = False

    def names(self) -> frozenset[str]:
        return frozenset(self.tensors)

    def load(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def target_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=generator)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }


@dataclass
class HeadFiles:
    """A head before it is written: settings by place, tensors by name with `layers.0.`."""

    settings: dict[str, object]
    tensors: dict[str, torch.Tensor]
    layer: str = "layers.0."
    prefix: str = ""
    layer_settings: dict[str, object] = field(default_factory=dict)  # of speculators

    def stored_name(self, name: str) -> str:
        if name in ("d2t", "t2d", "lm_head.weight"):
            return name
        return self.prefix + name.replace("layers.0.", self.layer)

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        settings = dict(self.settings)
        if self.layer_settings:
            settings["transformer_layer_config"] = self.layer_settings
        (directory / "config.json").write_text(json.dumps(settings))
        stored = {self.stored_name(name): tensor for name, tensor in self.tensors.items()}
        save_file(stored, directory / "model.safetensors")
        return directory


def flat_head(*, draft_vocab_size: int | None = DRAFT_VOCAB_SIZE, **settings: object) -> HeadFiles:
    """The layout of SafeAILab and SpecForge, with the tensors that the settings ask for."""
    merged = {
        **LAYER_SETTINGS,
        "architectures": ["LlamaForCausalLMEagle3"],
        "tie_word_embeddings": False,
        "draft_vocab_size": draft_vocab_size,
        **settings,
    }
    return HeadFiles(
        settings=merged, tensors=head_tensors(merged, draft_vocab_size), layer="midlayer."
    )


def speculators_head(*, draft_vocab_size: int = DRAFT_VOCAB_SIZE, **settings: object) -> HeadFiles:
    """The layout of the speculators library, which carries the embedding."""
    merged = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"name_or_path": "a/b"}},
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": None,
        **settings,
    }
    tensors = head_tensors(merged, draft_vocab_size)
    tensors["embed_tokens.weight"] = 0.5 * target_tensors()["model.embed_tokens.weight"]
    return HeadFiles(
        settings=merged,
        tensors=tensors,
        layer_settings={**LAYER_SETTINGS, "architectures": ["LlamaForCausalLM"]},
    )


def head_tensors(
    settings: Mapping[str, object], draft_vocab_size: int | None, num_layers: int = 3
) -> dict[str, torch.Tensor]:
    """Random tensors, in float32; norms away from one."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5 * 1.5

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    size, inputs = HIDDEN_SIZE, 2 * HIDDEN_SIZE
    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    layer = "layers.0."
    tensors = {
        "fc.weight": random(size, num_layers * size),
        layer + "input_layernorm.weight": norm(size),
        layer + "hidden_norm.weight": norm(size),
        layer + "post_attention_layernorm.weight": norm(size),
        layer + "self_attn.q_proj.weight": random(queries, inputs),
        layer + "self_attn.k_proj.weight": random(keys, inputs),
        layer + "self_attn.v_proj.weight": random(keys, inputs),
        layer + "self_attn.o_proj.weight": random(size, queries),
        layer + "mlp.gate_proj.weight": random(INTERMEDIATE_SIZE, size),
        layer + "mlp.up_proj.weight": random(INTERMEDIATE_SIZE, size),
        layer + "mlp.down_proj.weight": random(size, INTERMEDIATE_SIZE),
        "norm.weight": norm(size),
    }
    if settings.get("bias"):
        tensors["fc.bias"] = norm(size)
    if settings.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_layers * size)
    if settings.get("fc_norm") or settings.get("use_aux_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm(size) for index in range(num_layers)}
    if settings.get("attention_bias"):
        for name, rows in (("q", queries), ("k", keys), ("v", keys), ("o", size)):
            tensors[f"{layer}self_attn.{name}_proj.bias"] = norm(rows)
    if draft_vocab_size is not None:
        tensors["lm_head.weight"] = random(draft_vocab_size, size) * 2
        if draft_vocab_size < VOCAB_SIZE:
            used = torch.randperm(VOCAB_SIZE, generator=generator)[:draft_vocab_size].sort().values
            tensors["d2t"] = used - torch.arange(draft_vocab_size)
            tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, used, True)
    return tensors
