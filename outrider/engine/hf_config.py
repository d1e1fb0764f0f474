"""ModelConfig from the config.json (and generation_config.json) of a Hugging Face checkpoint.

A setting that would change the result and is not implemented is refused by name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.engine.errors import ConfigError
from outrider.engine.model_config import ModelConfig, check_model_config
from outrider.engine.rope import LinearScaling, Llama3Scaling, RopeScaling

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

Settings = Mapping[str, Any]


def read_hf_config(directory: Path) -> ModelConfig:
    """Parse a checkpoint directory's description; raises ConfigError naming the setting."""
    settings = read_json(directory / "config.json")
    return model_config_of(settings, eos_token_ids=_eos_token_ids(directory, settings))


def model_config_of(settings: Settings, *, eos_token_ids: tuple[int, ...]) -> ModelConfig:
    """The decoder that a config.json describes; raises ConfigError naming the setting."""
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise ConfigError(
            f"config.json: model_type is {family!r}: must be one of {', '.join(FAMILIES)}"
        )
    _refuse_unsupported(settings)
    num_heads = integer(settings, "num_attention_heads")
    hidden_size = integer(settings, "hidden_size")
    max_position_embeddings = integer(settings, "max_position_embeddings")
    _refuse_active_sliding_window(settings, family, max_position_embeddings)
    rope = _rope_settings(settings)
    return check_model_config(
        ModelConfig(
            family=family,
            vocab_size=integer(settings, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=integer(settings, "intermediate_size"),
            num_layers=integer(settings, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_num_kv_heads(settings, family, num_heads),
            head_dim=_head_dim(settings, family, hidden_size, num_heads),
            rms_norm_eps=_number(settings, "rms_norm_eps", 1e-6),
            rope_theta=_number(rope, "rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            max_position_embeddings=max_position_embeddings,
            tie_word_embeddings=boolean(settings, "tie_word_embeddings"),
            attention_bias=family == "qwen2" or _attention_bias(settings, family),
            attention_output_bias=family != "qwen2" and _attention_bias(settings, family),
            qk_norm=family == "qwen3",
            eos_token_ids=eos_token_ids,
        )
    )


def read_json(path: Path) -> Settings:
    """Parse a JSON object; raises ConfigError naming the file."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must hold a JSON object, holds a {type(settings).__name__}")
    return settings


def integer(settings: Settings, name: str) -> int:
    """A setting that must be there and be a whole number; raises ConfigError naming it."""
    value = settings.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"config.json: {name} is {value!r}: must be an integer")
    return value


def _number(settings: Settings, name: str, default: float | None = None) -> float:
    value = settings.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(f"config.json: {name} is {value!r}: must be a positive number")
    return float(value)


def boolean(settings: Settings, name: str) -> bool:
    """A setting that is false where it is missing; raises ConfigError naming it."""
    value = settings.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {name} is {value!r}: must be true or false")
    return value


def _refuse_unsupported(settings: Settings) -> None:
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act is {activation!r}: only 'silu' is supported")
    for architecture in settings.get("architectures") or []:
        if not str(architecture).endswith("ForCausalLM"):
            raise ConfigError(
                f"config.json: architecture {architecture!r} is not a causal language model"
            )
    if boolean(settings, "mlp_bias"):
        raise ConfigError("config.json: mlp_bias is true: a bias in the MLP is not supported")
    if settings.get("quantization_config") is not None:
        raise ConfigError("config.json: quantization_config: only unquantised safetensors and GGUF")
    partial = settings.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor is {partial!r}: must be 1")


def _attention_bias(settings: Settings, family: str) -> bool:
    return family in ("llama", "qwen3") and boolean(settings, "attention_bias")


def _num_kv_heads(settings: Settings, family: str, num_heads: int) -> int:
    if family == "llama" and settings.get("num_key_value_heads") is None:
        return num_heads
    return integer(settings, "num_key_value_heads")


def _head_dim(settings: Settings, family: str, hidden_size: int, num_heads: int) -> int:
    # Qwen3's head size is not derived from the hidden size, so it has no default here.
    if settings.get("head_dim") is not None or family == "qwen3":
        return integer(settings, "head_dim")
    if num_heads < 1 or hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden_size}: must be a multiple of "
            f"num_attention_heads, which is {num_heads}, where head_dim is not given"
        )
    return hidden_size // num_heads


def _refuse_active_sliding_window(settings: Settings, family: str, length: int) -> None:
    window = settings.get("sliding_window")
    if family == "llama" or window is None:
        return
    # Mistral's window is on whenever it is set; Qwen's needs a switch, which is off by default.
    if family != "mistral" and not boolean(settings, "use_sliding_window"):
        return
    if integer(settings, "sliding_window") < length:
        raise ConfigError(
            f"config.json: sliding_window is {window}: a window below max_position_embeddings, "
            f"which is {length}, is not supported"
        )


def _rope_settings(settings: Settings) -> Settings:
    """One mapping of the two generations of keys: rope_theta + rope_scaling, or rope_parameters."""
    merged: dict[str, Any] = {}
    if settings.get("rope_theta") is not None:
        merged["rope_theta"] = settings["rope_theta"]
    for name in ("rope_scaling", "rope_parameters"):
        value = settings.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"config.json: {name} is {value!r}: must be an object")
        merged.update(value)
    return merged


def _rope_scaling(rope: Settings) -> RopeScaling | None:
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1, 1.0):
        raise ConfigError(f"config.json: partial_rotary_factor is {partial!r}: must be 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=_number(rope, "factor"))
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_number(rope, "factor"),
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
            original_max_position_embeddings=integer(rope, "original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ConfigError(
                f"config.json: high_freq_factor is {scaling.high_freq_factor}: must be above "
                f"low_freq_factor, which is {scaling.low_freq_factor}"
            )
        return scaling
    raise ConfigError(
        f"config.json: rope scaling {kind!r} is not supported: must be default, linear or llama3"
    )


def _eos_token_ids(directory: Path, settings: Settings) -> tuple[int, ...]:
    found: set[int] = set()
    sources = [settings]
    if (directory / "generation_config.json").is_file():
        sources.append(read_json(directory / "generation_config.json"))
    for source in sources:
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in values:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise ConfigError(f"eos_token_id is {value!r}: must be an integer or a list")
            found.add(token_id)
    return tuple(sorted(found))
