"""What the user asked of an engine. What boot measured is in `boot.EngineLimits`."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.engine.errors import ConfigError
from outrider.engine.layers import pack
from outrider.engine.model_config import usual_feature_layers

BFLOAT16_CAPABILITIES = ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")
DEVICE_NAME = re.compile(r"cpu|cuda(:\d+)?")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine: a checkpoint on a device, with its memory and step bounds."""

    model_path: Path  # a directory with config.json and *.safetensors, or a .gguf file
    dtype: str = "auto"  # auto | bfloat16 | float32
    device: str = "cpu"  # cpu | cuda | cuda:N
    kv_cache_bytes: int | None = None  # None: as the device has room for
    block_size: int = 32  # tokens per KV block
    max_sequence_length: int | None = None  # None: as long as the model and the cache allow
    max_step_rows: int = 512  # most rows (tokens) in one forward
    # What graphs are captured for, on a device that has them.
    max_sequences: int = 64
    max_draft_length: int = 5
    # Layers whose input features may be made of; none: see resolve_feature_layers.
    feature_layers: tuple[int, ...] = ()


def validate(config: EngineConfig) -> None:
    """Raise ConfigError, naming the field, its value and its bound, for an impossible field."""
    if config.dtype != "auto" and config.dtype not in DTYPES:
        raise ConfigError(f"dtype is {config.dtype!r}: must be auto, bfloat16 or float32")
    if not DEVICE_NAME.fullmatch(config.device):
        raise ConfigError(f"device is {config.device!r}: must be cpu, cuda or cuda:N")
    if not 8 <= config.block_size <= 256 or config.block_size & (config.block_size - 1):
        raise ConfigError(
            f"block_size is {config.block_size}: must be a power of two from 8 to 256"
        )
    if config.max_step_rows < 8:
        raise ConfigError(f"max_step_rows is {config.max_step_rows}: must be at least 8")
    if config.max_sequence_length is not None and config.max_sequence_length < 1:
        raise ConfigError(
            f"max_sequence_length is {config.max_sequence_length}: must be at least 1"
        )
    if config.kv_cache_bytes is not None and config.kv_cache_bytes < 1:
        raise ConfigError(f"kv_cache_bytes is {config.kv_cache_bytes}: must be positive")


def resolve_feature_layers(layer_ids: tuple[int, ...], num_layers: int) -> tuple[int, ...]:
    """The layers that features may be made of, ascending: those asked for, or else the usual ones.

    With fewer than 7 layers these coincide or do not exist: then those that are left. Raises
    ConfigError for a layer that the model does not have.
    """
    for layer_id in layer_ids:
        if not 0 <= layer_id < num_layers:
            raise ConfigError(
                f"feature_layers names layer {layer_id}: must be below {num_layers}, "
                "the model's number of layers"
            )
    usual = usual_feature_layers(num_layers)
    chosen = layer_ids or tuple(layer_id for layer_id in usual if 0 <= layer_id < num_layers)
    return tuple(sorted(set(chosen)))


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype of a validated name on a CPU; `auto` is bfloat16 where it has products of it.

    Elsewhere bfloat16 is emulated and slower than float32, or not there at all: ConfigError.
    """
    if name != "auto":
        dtype = DTYPES[name]
        try:
            pack(torch.zeros(8, 8, dtype=dtype))
        except RuntimeError as error:
            raise ConfigError(
                f"dtype is {name!r}: this processor has no products of it; use float32 or auto "
                f"({str(error).splitlines()[0]})"
            ) from error
        return dtype
    capabilities = torch.cpu.get_capabilities()
    has_bfloat16 = any(capabilities.get(flag, False) for flag in BFLOAT16_CAPABILITIES)
    return torch.bfloat16 if has_bfloat16 else torch.float32
