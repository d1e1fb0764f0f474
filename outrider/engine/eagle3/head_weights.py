"""Loads a head tensor by tensor and accounts for every one; the target's checkpoint gives the rest.

It knows neither files nor the forward pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.eagle3.head_config import Eagle3Config
from outrider.engine.eagle3.head_source import LAYER, HeadSource, open_head
from outrider.engine.errors import CheckpointError
from outrider.engine.feature_projection import (
    BIAS,
    INPUT_NORM,
    WEIGHT,
    part_norm_name,
    serialise_projection,
)
from outrider.engine.fingerprint import Fingerprint
from outrider.engine.layers import ColumnLinear, RmsNorm, RowLinear, VocabEmbedding, VocabHead
from outrider.engine.model_config import ModelConfig
from outrider.engine.placement import ON_CPU, Placement
from outrider.engine.tensor_source import TensorSource
from outrider.engine.weights import EMBEDDING as TARGET_EMBEDDING
from outrider.engine.weights import HEAD, load_checked, pair_rows

EMBEDDING = "embed_tokens.weight"
# Draft id k is target id k + d2t[k]; t2d says which target ids have a draft id.
DRAFT_TO_TARGET = "d2t"
TARGET_TO_DRAFT = "t2d"
ATTENTION = LAYER + "self_attn."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadWeights:
    """All weights of a head, in one dtype. Rows of queries and keys pair elements (2i, 2i + 1)."""

    embedding: VocabEmbedding
    embedding_norm: RmsNorm
    feature_norm: RmsNorm
    qkv: ColumnLinear  # of 2 * hidden_size
    output: RowLinear
    mlp_norm: RmsNorm
    gate_up: ColumnLinear
    down: RowLinear
    final_norm: RmsNorm
    head: VocabHead  # of draft_vocab_size
    # The target's id of each row of the head, ascending; None = they are the same.
    target_token_ids: npt.NDArray[np.int64] | None
    projection: bytes  # what the target runs, as load_projection reads it
    row_dtype: torch.dtype  # of projected feature rows
    fingerprint: str  # hex sha256 over the configuration and samples of every tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheckpoint:
    """The model that a head drafts for: it lends its embedding, and its head to some."""

    config: ModelConfig
    source: TensorSource


def load_head(
    config: Eagle3Config,
    directory: Path,
    target: TargetCheckpoint,
    dtype: torch.dtype,
    placement: Placement = ON_CPU,
) -> HeadWeights:
    """Load a head; raises CheckpointError naming the tensor for anything that does not fit."""
    source = open_head(directory)
    shapes = tensor_shapes(config)
    takes_head = _check_names(config, source, shapes, target)
    loader = _Loader(config, source, shapes, dtype, placement)
    target_ids = target_token_ids(config, source, loader.fingerprint)
    embedding = (
        loader.tensor(EMBEDDING)
        if EMBEDDING in source.names()
        else loader.of_target(target, TARGET_EMBEDDING)
    )
    head = loader.of_target(target, _head_name(target)) if takes_head else loader.tensor(HEAD)
    if target_ids is not None:
        # Ascending, so that of equal logits the same one wins as among all of the target's ids.
        order = target_ids.argsort()
        head, target_ids = head[torch.from_numpy(order)], target_ids[order]
    projection, row_dtype = loader.projection()
    return HeadWeights(
        embedding=VocabEmbedding(weight=placement.table(embedding)),
        embedding_norm=loader.norm(LAYER + "input_layernorm.weight"),
        feature_norm=loader.norm(LAYER + "hidden_norm.weight"),
        qkv=loader.qkv(),
        output=loader.output(),
        mlp_norm=loader.norm(LAYER + "post_attention_layernorm.weight"),
        gate_up=loader.gate_up(),
        down=RowLinear(
            weight=placement.matrix(loader.tensor(LAYER + "mlp.down_proj.weight")), bias=None
        ),
        final_norm=loader.norm("norm.weight"),
        head=VocabHead(weight=placement.matrix(head)),
        target_token_ids=target_ids,
        projection=projection,
        row_dtype=row_dtype,
        fingerprint=loader.fingerprint.hexdigest(),
    )


def tensor_shapes(config: Eagle3Config) -> Mapping[str, tuple[int, ...]]:
    """Name and shape of every floating-point tensor of a head that has all of its own."""
    layer = config.layer
    size, inputs = config.hidden_size, 2 * config.hidden_size
    captured = len(config.feature_layers.inputs) * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        WEIGHT: (size, captured),
        LAYER + "input_layernorm.weight": (size,),
        LAYER + "hidden_norm.weight": (size,),
        ATTENTION + "q_proj.weight": (layer.query_size, inputs),
        ATTENTION + "k_proj.weight": (layer.kv_size, inputs),
        ATTENTION + "v_proj.weight": (layer.kv_size, inputs),
        ATTENTION + "o_proj.weight": (size, layer.query_size),
        LAYER + "post_attention_layernorm.weight": (size,),
        LAYER + "mlp.gate_proj.weight": (layer.intermediate_size, size),
        LAYER + "mlp.up_proj.weight": (layer.intermediate_size, size),
        LAYER + "mlp.down_proj.weight": (size, layer.intermediate_size),
        "norm.weight": (size,),
        HEAD: (config.draft_vocab_size, size),
        EMBEDDING: (layer.vocab_size, size),
    }
    if config.fc_bias:
        shapes[BIAS] = (size,)
    if config.norm_before_fc:
        shapes[INPUT_NORM] = (captured,)
    if config.norm_parts_before_fc:
        for index in range(len(config.feature_layers.inputs)):
            shapes[part_norm_name(index)] = (config.target_hidden_size,)
    if layer.attention_bias:
        shapes[ATTENTION + "q_proj.bias"] = (layer.query_size,)
        shapes[ATTENTION + "k_proj.bias"] = (layer.kv_size,)
        shapes[ATTENTION + "v_proj.bias"] = (layer.kv_size,)
    if layer.attention_output_bias:
        shapes[ATTENTION + "o_proj.bias"] = (size,)
    return shapes


def _check_names(
    config: Eagle3Config,
    source: HeadSource,
    shapes: Mapping[str, tuple[int, ...]],
    target: TargetCheckpoint,
) -> bool:
    """Whether the head's output layer is the target's. Raises CheckpointError for a tensor that is
    missing or that nothing uses.
    """
    found, wanted = source.names(), set(shapes)
    is_as_wide = config.hidden_size == target.config.hidden_size
    # Whose rows are the target's ids: nothing may rename them, and the embedding be no other.
    takes_head = (
        config.has_whole_vocabulary
        and is_as_wide
        and not found & {HEAD, EMBEDDING, DRAFT_TO_TARGET}
    )
    if takes_head:
        wanted.discard(HEAD)
    if is_as_wide:
        wanted.discard(EMBEDDING)
    if not config.has_whole_vocabulary:
        wanted.add(DRAFT_TO_TARGET)
    problems = []
    if missing := sorted(wanted - found):
        problems.append(
            f"tensor {source.stored_name(missing[0])} is missing ({len(missing)} missing in all)"
        )
    if unexpected := sorted(found - set(shapes) - {DRAFT_TO_TARGET, TARGET_TO_DRAFT}):
        problems.append(
            f"tensor {source.stored_name(unexpected[0])} is not part of an EAGLE-3 head of this "
            f"configuration ({len(unexpected)} unexpected in all)"
        )
    if problems:
        raise CheckpointError("; ".join(problems))
    return takes_head


def _head_name(target: TargetCheckpoint) -> str:
    return TARGET_EMBEDDING if target.config.tie_word_embeddings else HEAD


def target_token_ids(
    config: Eagle3Config, source: HeadSource, fingerprint: Fingerprint
) -> npt.NDArray[np.int64] | None:
    """The target's id of each draft id, checked; None where the file has no map."""
    if DRAFT_TO_TARGET not in source.names():
        target_ids = None
    else:
        offsets = source.load_integers(DRAFT_TO_TARGET)
        fingerprint.add(DRAFT_TO_TARGET, offsets)
        _check_shape(DRAFT_TO_TARGET, offsets, config.draft_vocab_size)
        target_ids = (torch.arange(len(offsets)) + offsets).numpy()
        vocab_size = config.layer.vocab_size
        outside = np.flatnonzero((target_ids < 0) | (target_ids >= vocab_size))
        if len(outside):
            first = int(outside[0])
            raise CheckpointError(
                f"tensor {DRAFT_TO_TARGET} maps draft id {first} to {target_ids[first]}: must be "
                f"from 0 to {vocab_size - 1} ({len(outside)} in all)"
            )
        ids, counts = np.unique(target_ids, return_counts=True)
        if len(ids) < len(target_ids):
            raise CheckpointError(
                f"tensor {DRAFT_TO_TARGET} maps {counts.max()} draft ids to "
                f"{ids[counts.argmax()]}: must be one each"
            )
    if TARGET_TO_DRAFT in source.names():
        mask = source.load_integers(TARGET_TO_DRAFT)
        _check_shape(TARGET_TO_DRAFT, mask, config.layer.vocab_size)
        _check_mask(mask.numpy() != 0, target_ids)
    return target_ids


def _check_mask(mask: npt.NDArray[np.bool_], target_ids: npt.NDArray[np.int64] | None) -> None:
    mapped = np.ones_like(mask)
    if target_ids is not None:
        mapped[:] = False
        mapped[target_ids] = True
    differing = np.flatnonzero(mask != mapped)
    if len(differing):
        token_id = int(differing[0])
        raise CheckpointError(
            f"tensor {TARGET_TO_DRAFT} says {bool(mask[token_id])} of target id {token_id}, and "
            f"{DRAFT_TO_TARGET} {bool(mapped[token_id])} ({len(differing)} ids differ)"
        )


def _check_shape(name: str, tensor: torch.Tensor, length: int) -> None:
    if tuple(tensor.shape) != (length,):
        raise CheckpointError(f"tensor {name} has shape {list(tensor.shape)}: must be [{length}]")


class _Loader:
    """Fetches, checks and fuses the tensors of one head."""

    def __init__(
        self,
        config: Eagle3Config,
        source: HeadSource,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self._placement = placement
        self._config = config
        self._source = source
        self._shapes = shapes
        self._dtype = dtype
        self.fingerprint = Fingerprint(config)

    def tensor(self, name: str) -> torch.Tensor:
        return self._checked(name)[1]

    def _checked(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As stored, and in the dtype of the engine."""
        stored_name = self._source.stored_name(name)
        stored, tensor = load_checked(
            self._source.files, stored_name, self._shapes[name], self._dtype
        )
        self.fingerprint.add(name, stored)
        return stored, tensor

    def of_target(self, target: TargetCheckpoint, name: str) -> torch.Tensor:
        """The target's embedding or head."""
        if name not in target.source.names():
            raise CheckpointError(f"tensor {name} is missing in the target's checkpoint")
        shape = (target.config.vocab_size, target.config.hidden_size)
        stored, tensor = load_checked(target.source, name, shape, self._dtype)
        self.fingerprint.add(f"target {name}", stored)
        return tensor

    def norm(self, name: str) -> RmsNorm:
        weight = self._placement.table(self.tensor(name))
        return RmsNorm(weight=weight, eps=self._config.layer.rms_norm_eps)

    def qkv(self) -> ColumnLinear:
        bias = None
        if self._config.layer.attention_bias:
            bias = self._placement.table(self._fused_qkv("bias"))
        return ColumnLinear(weight=self._placement.matrix(self._fused_qkv("weight")), bias=bias)

    def _fused_qkv(self, kind: str) -> torch.Tensor:
        head_dim = self._config.layer.head_dim
        q, k, v = (self.tensor(f"{ATTENTION}{part}_proj.{kind}") for part in "qkv")
        return torch.cat((pair_rows(q, head_dim), pair_rows(k, head_dim), v))

    def output(self) -> RowLinear:
        has_bias = self._config.layer.attention_output_bias
        return RowLinear(
            weight=self._placement.matrix(self.tensor(ATTENTION + "o_proj.weight")),
            bias=(
                self._placement.table(self.tensor(ATTENTION + "o_proj.bias")) if has_bias else None
            ),
        )

    def gate_up(self) -> ColumnLinear:
        gate, up = (self.tensor(f"{LAYER}mlp.{part}_proj.weight") for part in ("gate", "up"))
        return ColumnLinear(weight=self._placement.matrix(torch.cat((gate, up))), bias=None)

    def projection(self) -> tuple[bytes, torch.dtype]:
        """What the target runs, and the dtype in which its rows travel: float16 where the head is
        stored in it, else bfloat16, whose range holds every hidden state.
        """
        config = self._config
        names = [WEIGHT]
        if config.fc_bias:
            names.append(BIAS)
        if config.norm_before_fc:
            names.append(INPUT_NORM)
        if config.norm_parts_before_fc:
            names.extend(
                part_norm_name(index) for index in range(len(config.feature_layers.inputs))
            )
        stored = {name: self._checked(name)[0] for name in names}
        is_half = stored[WEIGHT].dtype is torch.float16
        row_dtype = torch.float16 if is_half else torch.bfloat16
        data = serialise_projection(
            stored,
            layer_ids=config.feature_layers.inputs,
            row_dtype=row_dtype,
            rms_norm_eps=config.layer.rms_norm_eps,
        )
        return data, row_dtype
