"""Where a checkpoint's tensors come from, one at a time. It knows files, not what tensors mean."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from outrider.engine.errors import CheckpointError
from outrider.engine.hf_config import read_json

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class TensorSource(Protocol):
    """A checkpoint's tensors under their Hugging Face names."""

    # Whether the q and k rows of a head already pair (2i, 2i + 1) instead of (i, i + head_dim / 2).
    pairs_adjacent: bool

    def names(self) -> frozenset[str]: ...

    def load(self, name: str) -> torch.Tensor:
        """A floating-point tensor on CPU; raises CheckpointError naming the tensor."""
        ...


class SafetensorsSource:
    """The tensors of a directory of safetensors files, read by memory map."""

    pairs_adjacent = False

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def names(self) -> frozenset[str]:
        return frozenset(self._files)

    def load(self, name: str) -> torch.Tensor:
        tensor = self._stored(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                f"{self._files[name]}: {name}: dtype is {tensor.dtype}: "
                "must be float32, float16 or bfloat16"
            )
        return tensor

    def load_integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers or truth values as int64; raises CheckpointError naming it."""
        tensor = self._stored(name)
        if tensor.is_floating_point() or tensor.is_complex():
            raise CheckpointError(
                f"{self._files[name]}: {name}: dtype is {tensor.dtype}: must be whole numbers"
            )
        return tensor.to(torch.int64)

    def _stored(self, name: str) -> torch.Tensor:
        path = self._files[name]
        try:
            with safe_open(path, framework="pt") as reader:
                tensor: torch.Tensor = reader.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{path}: {name}: {error}") from error
        return tensor


def open_safetensors(directory: Path) -> SafetensorsSource:
    """Find every tensor of a directory; raises CheckpointError for missing or broken files."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        return SafetensorsSource(_indexed_files(directory, index_path))
    paths = sorted(directory.glob("*.safetensors"))
    whole = directory / "model.safetensors"
    if whole in paths:
        paths = [whole]
    if len(paths) != 1:
        raise CheckpointError(
            f"{directory}: {len(paths)} *.safetensors files and no {index_path.name}: "
            "must be one file, or several with their index"
        )
    return SafetensorsSource(dict.fromkeys(_names_in(paths[0]), paths[0]))


def _indexed_files(directory: Path, index_path: Path) -> dict[str, Path]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index_path}: has no object weight_map")
    files: dict[str, Path] = {}
    for file_name in sorted({str(value) for value in weight_map.values()}):
        path = directory / file_name
        if path.parent != directory or not path.is_file():
            raise CheckpointError(f"{index_path}: shard {file_name!r} is not in {directory}")
        for name in _names_in(path):
            if weight_map.get(name) != file_name:
                raise CheckpointError(f"{path}: tensor {name} is not placed there by the index")
            files[name] = path
    for name, file_name in weight_map.items():
        if name not in files:
            raise CheckpointError(f"{directory / str(file_name)}: tensor {name} is missing")
    return files


def _names_in(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as reader:
            return list(reader.keys())
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error
