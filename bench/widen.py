"""Widens a model without changing what it says: a large model's cost with a small one's text.

    python -m bench.widen OUTPUT [--factor 8] [--head HEAD --head-output DIR] [--device cuda]

Every channel of the residual stream, every attention head and every unit of the MLPs becomes
`factor` replicas that hold the same number. RMS norm does not see replication; each incoming weight
is divided among the replicas of its input in random positive shares that sum to one, different for
each output, so that no two rows are equal. The output head is untied from the embedding, which
only replicates, and divides likewise. With factor 8 the default model has about 7 billion
parameters: width 4608, 72 query and 24 key heads of 64, MLP 12288, 30 layers.

It is a benchmark's model: its weights are of full rank and cost what any do, its probabilities are
the small model's up to rounding, and so are what drafts of the small model or of a widened head are
worth. It is no better at anything than the small one, and nothing about a real 7-billion model's
acceptance follows from it.

Written as a Hugging Face Llama checkpoint, which any engine loads, with the tokenizer's files.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from outrider.engine.boot import read_model
from outrider.engine.eagle3.head_config import TARGET_RECORD, Eagle3Config, read_head_config
from outrider.engine.eagle3.head_source import open_head
from outrider.engine.model_config import ModelConfig
from outrider.engine.tensor_source import TensorSource
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from outrider.serving.tokenizer import load_tokenizer
from training.earlier_head import read_earlier_head

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# A share is drawn from this band before it is divided by the sum.
SMALLEST_SHARE, LARGEST_SHARE = 0.5, 1.5
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class Widener:
    """Draws the shares; computes on one device, in float32."""

    def __init__(self, factor: int, *, device: str, dtype: torch.dtype, seed: int) -> None:
        self.factor = factor
        self._device = torch.device(device)
        self._dtype = dtype
        self._generator = torch.Generator(self._device).manual_seed(seed)

    def norm(self, weight: torch.Tensor) -> torch.Tensor:
        """[width] -> [factor * width]"""
        return self._stored(weight.repeat(self.factor))

    def columns(self, weight: torch.Tensor) -> torch.Tensor:
        """Replicates what a row holds, [rows, width] -> [rows, factor * width]: an embedding."""
        return self._stored(weight.to(self._device).repeat(1, self.factor))

    def product(
        self, weight: torch.Tensor, *, parts: int = 1, replicates_output: bool = True
    ) -> torch.Tensor:
        """[out, in] -> [factor * out, factor * in], or [out, factor * in].

        `parts`: the input is so many vectors one behind the other, each replicated by itself.
        """
        factor = self.factor
        copies = factor if replicates_output else 1
        size = weight.shape[1] // parts
        pieces = []
        for part in weight.to(self._device).float().split(size, dim=1):
            shares = torch.empty(copies, len(weight), factor, size, device=self._device)
            shares.uniform_(SMALLEST_SHARE, LARGEST_SHARE, generator=self._generator)
            shares /= shares.sum(2, keepdim=True)
            shares *= part[None, :, None, :]
            pieces.append(shares.reshape(copies * len(weight), factor * size))
        return self._stored(torch.cat(pieces, dim=1))

    def _stored(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to("cpu", self._dtype).contiguous()


def widened_config(config: ModelConfig, factor: int) -> ModelConfig:
    """The sizes of a widened model."""
    return replace(
        config,
        hidden_size=factor * config.hidden_size,
        intermediate_size=factor * config.intermediate_size,
        num_heads=factor * config.num_heads,
        num_kv_heads=factor * config.num_kv_heads,
        tie_word_embeddings=False,
    )


def widened_layer(
    config: ModelConfig, source: TensorSource, widener: Widener, index: int
) -> dict[str, torch.Tensor]:
    """One decoder layer, by the names of a Hugging Face checkpoint."""
    prefix = f"model.layers.{index}."
    tensors = {}
    for name in ("input_layernorm", "post_attention_layernorm"):
        tensors[f"{prefix}{name}.weight"] = widener.norm(source.load(f"{prefix}{name}.weight"))
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        weight = source.load(f"{prefix}self_attn.{name}.weight")
        if name in ("q_proj", "k_proj") and source.pairs_adjacent:
            weight = _halves(weight, config.head_dim)
        tensors[f"{prefix}self_attn.{name}.weight"] = widener.product(weight)
    for name in ("gate_proj", "up_proj", "down_proj"):
        weight = source.load(f"{prefix}mlp.{name}.weight")
        tensors[f"{prefix}mlp.{name}.weight"] = widener.product(weight)
    return tensors


def write_model(model: Path, output: Path, widener: Widener) -> None:
    """A shard a layer, and one for the rest; raises SystemExit for a model that is no plain
    Llama.
    """
    config, source = read_model(model)
    if config.attention_bias or config.attention_output_bias or config.qk_norm:
        raise SystemExit(f"{model}: must be a Llama model without biases and norms of heads")
    output.mkdir(parents=True)
    embedding = source.load(EMBEDDING)
    head = embedding if config.tie_word_embeddings else source.load(HEAD)
    weight_map: dict[str, str] = {}

    def write(file_name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        save_file(dict(tensors), output / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))

    write(
        "outer.safetensors",
        {
            EMBEDDING: widener.columns(embedding),
            HEAD: widener.product(head, replicates_output=False),
            "model.norm.weight": widener.norm(source.load("model.norm.weight")),
        },
    )
    for index in range(config.num_layers):
        write(f"layer-{index:03d}.safetensors", widened_layer(config, source, widener, index))
        print(f"layer {index + 1} of {config.num_layers}", file=sys.stderr, flush=True)
    index_text = json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1)
    (output / "model.safetensors.index.json").write_text(index_text, encoding="utf-8")
    wide = widened_config(config, widener.factor)
    (output / "config.json").write_text(json.dumps(_hf_config(wide), indent=1), encoding="utf-8")


def write_tokenizer(model: Path, output: Path) -> None:
    """The files from which any engine reads the same tokenizer and chat template."""
    vocabulary = load_tokenizer(model)
    tokenizer = vocabulary.first_run
    tokenizer.save(str(output / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        **vocabulary.special_tokens,
    }
    if vocabulary.chat_template is not None:
        settings["chat_template"] = vocabulary.chat_template
    text = json.dumps(settings, indent=1, ensure_ascii=False)
    (output / "tokenizer_config.json").write_text(text, encoding="utf-8")


def write_head(head: Path, model: Path, output: Path, widener: Widener, name: str) -> None:
    """An EAGLE-3 head for the widened model, in the public layout."""
    config, _ = read_model(model)
    small = read_head_config(head, config)
    earlier = read_earlier_head(head, config)
    tensors = {}
    for parameter, weight in earlier.parameters.items():
        if weight.ndim == 1:
            tensors[parameter] = widener.norm(weight)
        else:
            tensors[parameter] = widener.product(
                weight, parts=_parts(parameter, small), replicates_output=parameter != HEAD
            )
    source = open_head(head)
    for stored in ("d2t", "t2d"):
        if stored in source.names():
            kept = source.load_integers(stored)
            tensors[stored] = kept if stored == "d2t" else kept.bool()
    output.mkdir(parents=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((head / "config.json").read_text(encoding="utf-8"))
    for field in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"):
        settings[field] *= widener.factor
    if TARGET_RECORD in settings:
        settings[TARGET_RECORD]["name"] = name
    (output / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _parts(parameter: str, config: Eagle3Config) -> int:
    """Vectors of the residual stream that a head's product reads one behind the other."""
    if parameter == "fc.weight":
        return len(config.feature_layers.inputs)
    if parameter.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return 2  # the token's embedding and the feature
    return 1


def _halves(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows (2i, 2i + 1) of each head, a rotation's pair, to (i, i + head_dim / 2)."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _hf_config(config: ModelConfig) -> dict[str, object]:
    eos = list(config.eos_token_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": "bfloat16",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--factor", type=int, default=8)
    parser.add_argument("--head", type=Path, help="directory of an EAGLE-3 head of the model")
    parser.add_argument("--head-output", type=Path)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--device", default="cpu", help="where shares are drawn")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if (arguments.head is None) != (arguments.head_output is None):
        parser.error("--head and --head-output belong together")
    model = resolve_model(arguments.model).path
    widener = Widener(
        arguments.factor,
        device=arguments.device,
        dtype=DTYPES[arguments.dtype],
        seed=arguments.seed,
    )
    write_model(model, arguments.output, widener)
    write_tokenizer(model, arguments.output)
    if arguments.head is not None:
        name = arguments.output.name
        write_head(arguments.head, model, arguments.head_output, widener, name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
