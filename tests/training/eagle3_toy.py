"""A tiny random target on disk, and rows that it writes greedily."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.data import Row, write_rows
from training.target import DenseTarget, load_target

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_target(directory: Path) -> DenseTarget:
    """A checkpoint of 7 random layers whose text does not repeat itself at once."""
    generator = torch.Generator().manual_seed(1)
    width, inner, kv = 32, 64, 16

    def draw(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    tensors = {
        "model.embed_tokens.weight": draw(64, width, scale=1.0),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": draw(64, width, scale=0.5),
    }
    for index in range(7):
        prefix = f"model.layers.{index}."
        for name, shape in {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            # The next token hangs on the last one more than on those before: learnt quickly.
            share = 0.4 if name.endswith(("o_proj", "down_proj")) else 1.0
            tensors[f"{prefix}{name}.weight"] = draw(*shape, scale=share * shape[1] ** -0.5)
        tensors[f"{prefix}input_layernorm.weight"] = torch.ones(width)
        tensors[f"{prefix}post_attention_layernorm.weight"] = torch.ones(width)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return load_target(directory)


def write_data(path: Path, target: DenseTarget, *, rows: int, length: int, seed: int) -> None:
    """Rows of a random prompt and what the target says after it, greedily."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 64, (rows, 6), generator=generator)
    while tokens.shape[1] < length:
        _, hidden = target(tokens, ())
        logits = hidden[:, -1] @ target.head.T
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), 1)
    write_rows(path, [Row(row.numpy(), 6) for row in tokens])
