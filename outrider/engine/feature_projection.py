"""The `fc` of a head: captured hidden states of a target's rows into the features that its drafter
reads (EAGLE-3, arXiv 2503.01840, section 3.1).

It knows where the weights come from only as bytes in safetensors format, and nothing of links.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from outrider.engine.errors import CheckpointError
from outrider.engine.layers import ColumnLinear, RmsNorm
from outrider.engine.placement import ON_CPU, Placement

WEIGHT = "fc.weight"
BIAS = "fc.bias"
INPUT_NORM = "input_norm.weight"
# One key, so that equal projections are equal bytes: safetensors orders several as it likes.
METADATA = "feature_projection"
STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROW_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureProjection:
    """f = fc(norms(g)), with g the concatenation of a row's hidden states entering some layers.

    Either one RMS norm goes over the whole of g, or one over each layer's part, or none.
    """

    layer_ids: tuple[int, ...]  # ascending: the order of the parts of g
    width: int
    row_dtype: torch.dtype  # bfloat16 or float16
    sha256: str  # hex, of the bytes that it was loaded from
    input_norm: RmsNorm | None  # over len(layer_ids) * hidden_size
    part_norms: tuple[RmsNorm, ...]  # one per layer, or none
    product: ColumnLinear

    def project(self, captured: torch.Tensor) -> torch.Tensor:
        """[rows, len(layer_ids) * hidden_size] in the engine's dtype -> [rows, width] in row_dtype.

        What row_dtype cannot hold becomes its largest number, never infinite.
        """
        if self.input_norm is not None:
            captured = self.input_norm(captured)
        elif self.part_norms:
            parts = captured.chunk(len(self.part_norms), dim=1)
            captured = torch.cat(
                [norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=1
            )
        projected = self.product(captured)
        if projected.dtype == self.row_dtype:
            return projected
        # By way of float32, where the bound of either format is exact.
        bound = torch.finfo(self.row_dtype).max
        return projected.float().clamp_(-bound, bound).to(self.row_dtype)


def part_norm_name(index: int) -> str:
    """The tensor that normalises the part of the index-th layer."""
    return f"fc_norm.{index}.weight"


def serialise_projection(
    tensors: Mapping[str, torch.Tensor],
    *,
    layer_ids: Sequence[int],
    row_dtype: torch.dtype,
    rms_norm_eps: float,
) -> bytes:
    """A projection as it is sent: safetensors with its description as metadata. Equal input gives
    equal bytes.

    Tensors: fc.weight [width, layers * hidden_size]; where the head has them fc.bias [width] and
    either input_norm.weight [layers * hidden_size] or fc_norm.{index}.weight [hidden_size] for
    every layer.
    """
    names = {dtype: name for name, dtype in ROW_DTYPES.items()}
    description = {
        "layer_ids": list(layer_ids),
        "rms_norm_eps": rms_norm_eps,
        "row_dtype": names[row_dtype],
    }
    return save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        metadata={METADATA: json.dumps(description, sort_keys=True)},
    )


def load_projection(
    data: bytes, *, hidden_size: int, dtype: torch.dtype, placement: Placement = ON_CPU
) -> FeatureProjection:
    """A projection for an engine of a width and dtype. Nothing about the bytes is trusted.

    Raises CheckpointError naming the tensor, or the entry of the description, that does not fit.
    """
    try:
        stored = dict(deserialize(data))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CheckpointError(f"feature projection: not in safetensors format: {error}") from error
    layer_ids, row_dtype, eps = _description(data)
    tensors = _Tensors(stored, dtype)
    num_columns = len(layer_ids) * hidden_size
    shape = tensors.shape(WEIGHT)
    if len(shape) != 2 or shape[0] == 0:
        raise CheckpointError(f"tensor {WEIGHT} has shape {list(shape)}: must have two dimensions")
    width = shape[0]
    part_norm_names = [part_norm_name(index) for index in range(len(layer_ids))]
    _check_names(stored, part_norm_names)
    return FeatureProjection(
        layer_ids=layer_ids,
        width=width,
        row_dtype=row_dtype,
        sha256=hashlib.sha256(data).hexdigest(),
        input_norm=(
            RmsNorm(weight=placement.table(tensors.load(INPUT_NORM, (num_columns,))), eps=eps)
            if INPUT_NORM in stored
            else None
        ),
        part_norms=tuple(
            RmsNorm(weight=placement.table(tensors.load(name, (hidden_size,))), eps=eps)
            for name in part_norm_names
            if name in stored
        ),
        product=ColumnLinear(
            weight=placement.matrix(tensors.load(WEIGHT, (width, num_columns))),
            bias=placement.table(tensors.load(BIAS, (width,))) if BIAS in stored else None,
        ),
    )


class _Tensors:
    """The stored tensors, checked one by one."""

    def __init__(self, stored: Mapping[str, Mapping[str, object]], dtype: torch.dtype) -> None:
        self._stored = stored
        self._dtype = dtype

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._stored:
            raise CheckpointError(f"tensor {name} is missing")
        shape = self._stored[name]["shape"]
        assert isinstance(shape, list)
        return tuple(shape)

    def load(self, name: str, wanted: tuple[int, ...]) -> torch.Tensor:
        shape = self.shape(name)
        if shape != wanted:
            raise CheckpointError(f"tensor {name} has shape {list(shape)}: must be {list(wanted)}")
        stored_dtype = STORED_DTYPES.get(str(self._stored[name]["dtype"]))
        if stored_dtype is None:
            raise CheckpointError(
                f"tensor {name} is stored as {self._stored[name]['dtype']}: "
                f"must be {', '.join(STORED_DTYPES)}"
            )
        content = self._stored[name]["data"]
        assert isinstance(content, bytes | bytearray)
        # Copied once: the weights must not keep the whole message alive, nor share its alignment.
        tensor = torch.frombuffer(bytearray(content), dtype=stored_dtype).view(shape)
        tensor = tensor.to(self._dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"tensor {name} has values that are not finite in {self._dtype}")
        if not bool(tensor.any()):
            raise CheckpointError(f"tensor {name} is all zero")
        return tensor


def _check_names(stored: Mapping[str, object], part_norm_names: Sequence[str]) -> None:
    part_norms = [name for name in part_norm_names if name in stored]
    if part_norms and len(part_norms) < len(part_norm_names):
        missing = next(name for name in part_norm_names if name not in stored)
        raise CheckpointError(f"tensor {missing} is missing beside {part_norms[0]}")
    if part_norms and INPUT_NORM in stored:
        raise CheckpointError(f"tensor {part_norms[0]} is unexpected beside {INPUT_NORM}")
    known = {WEIGHT, BIAS, INPUT_NORM, *part_norm_names}
    if unexpected := sorted(set(stored) - known):
        raise CheckpointError(
            f"tensor {unexpected[0]} is not part of a feature projection "
            f"of {len(part_norm_names)} layers"
        )


def _description(data: bytes) -> tuple[tuple[int, ...], torch.dtype, float]:
    """(layer_ids, row_dtype, rms_norm_eps) of bytes that are in safetensors format."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    text = header.get("__metadata__", {}).get(METADATA)
    if text is None:
        raise CheckpointError(f"feature projection: metadata {METADATA} is missing")
    try:
        description = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"feature projection: metadata is not JSON: {error}") from error
    if not isinstance(description, dict):
        raise CheckpointError("feature projection: metadata is not an object")
    layer_ids = description.get("layer_ids")
    # bool is a kind of int.
    if (
        not isinstance(layer_ids, list)
        or not layer_ids
        or not all(type(layer_id) is int and layer_id >= 0 for layer_id in layer_ids)
        or sorted(set(layer_ids)) != layer_ids
    ):
        raise CheckpointError(
            f"feature projection: layer_ids is {layer_ids!r}: must be layers, ascending"
        )
    row_dtype = description.get("row_dtype")
    if not isinstance(row_dtype, str) or row_dtype not in ROW_DTYPES:
        raise CheckpointError(
            f"feature projection: row_dtype is {row_dtype!r}: must be bfloat16 or float16"
        )
    eps = description.get("rms_norm_eps")
    if not isinstance(eps, float) or not math.isfinite(eps) or not 0 <= eps < 1:
        raise CheckpointError(
            f"feature projection: rms_norm_eps is {eps!r}: must be from 0 to below 1"
        )
    return tuple(layer_ids), ROW_DTYPES[row_dtype], eps
