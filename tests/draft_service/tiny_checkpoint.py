"""A random checkpoint of a few thousand weights with a byte-level tokenizer, in a directory."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN_SIZE = 32
INTERMEDIATE_SIZE = 48
NUM_LAYERS = 2
NUM_HEADS = 4
HEAD_DIM = HIDDEN_SIZE // NUM_HEADS
MAX_SEQUENCE_LENGTH = 160
# One past the bytes; a random model says it about once in 260 tokens.
EOS_TOKEN_ID = 256
VOCAB_SIZE = 264


def write_checkpoint(directory: Path, *, seed: int = 0, end_token: str = "</s>") -> Path:
    """Writes config, weights and tokenizer; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": VOCAB_SIZE,
                "hidden_size": HIDDEN_SIZE,
                "intermediate_size": INTERMEDIATE_SIZE,
                "num_hidden_layers": NUM_LAYERS,
                "num_attention_heads": NUM_HEADS,
                "num_key_value_heads": NUM_HEADS,
                "max_position_embeddings": MAX_SEQUENCE_LENGTH,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "eos_token_id": EOS_TOKEN_ID,
            }
        )
    )
    save_file(_weights(seed), directory / "model.safetensors")
    _tokenizer(end_token).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": end_token}))
    return directory


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    weights = {
        "model.embed_tokens.weight": random(VOCAB_SIZE, HIDDEN_SIZE),
        "model.norm.weight": torch.ones(HIDDEN_SIZE),
        "lm_head.weight": random(VOCAB_SIZE, HIDDEN_SIZE),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q", "k", "v", "o"):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = random(HIDDEN_SIZE, HIDDEN_SIZE)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = random(INTERMEDIATE_SIZE, HIDDEN_SIZE)
        weights[f"{prefix}mlp.down_proj.weight"] = random(HIDDEN_SIZE, INTERMEDIATE_SIZE)
        for name in ("input", "post_attention"):
            weights[f"{prefix}{name}_layernorm.weight"] = torch.ones(HIDDEN_SIZE)
    return weights


def _tokenizer(end_token: str) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([end_token])
    return tokenizer
