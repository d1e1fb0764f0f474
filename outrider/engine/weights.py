"""Loads a checkpoint tensor by tensor into the layers of a decoder, and accounts for every one.

It knows neither files (`tensor_source.py`, `gguf_source.py`) nor the forward pass (`model.py`).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from outrider.engine.errors import CheckpointError
from outrider.engine.fingerprint import Fingerprint
from outrider.engine.layers import (
    ColumnLinear,
    HeadNorm,
    RmsNorm,
    RowLinear,
    VocabEmbedding,
    VocabHead,
)
from outrider.engine.model_config import ModelConfig
from outrider.engine.placement import ON_CPU, Placement
from outrider.engine.tensor_source import TensorSource

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Buffers that old checkpoints carry and that follow from the configuration.
IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one decoder layer. Query, key and value are one product; gate and up another.

    Rows of queries and keys pair elements (2i, 2i + 1) for the rotation.
    """

    input_norm: RmsNorm
    qkv: ColumnLinear
    qk_norm: HeadNorm | None  # over num_heads + num_kv_heads heads
    output: RowLinear
    mlp_norm: RmsNorm
    gate_up: ColumnLinear
    down: RowLinear


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderWeights:
    """All weights of a decoder, in one dtype."""

    embedding: VocabEmbedding
    layers: tuple[Layer, ...]
    final_norm: RmsNorm
    head: VocabHead
    fingerprint: str  # hex sha256 over the configuration and samples of every tensor


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    dtype: torch.dtype,
    note: Callable[[str], None],
    placement: Placement = ON_CPU,
) -> DecoderWeights:
    """Load a model; raises CheckpointError naming the tensor for anything that does not fit.

    At any time one fused weight is in memory beside the finished layers. `note` hears of progress.
    """
    check_names(config, source)
    loader = _Loader(config, source, dtype, placement)
    read = loader.tensor(EMBEDDING)
    if config.tie_word_embeddings and HEAD in source.names():
        _check_tied_head(source, dtype, read)
    embedding = placement.table(read)
    head = placement.matrix(embedding if config.tie_word_embeddings else loader.tensor(HEAD))
    del read
    layers = []
    for index in range(config.num_layers):
        layers.append(loader.layer(index))
        if (index + 1) % 8 == 0 or index + 1 == config.num_layers:
            note(f"{index + 1} of {config.num_layers} layers")
    return DecoderWeights(
        embedding=VocabEmbedding(weight=embedding),
        layers=tuple(layers),
        final_norm=loader.norm("model.norm.weight"),
        head=VocabHead(weight=head),
        fingerprint=loader.fingerprint.hexdigest(),
    )


def with_max_rows(weights: DecoderWeights, max_rows: int) -> DecoderWeights:
    """The same weights, whose products are computed in pieces of at most so many rows."""

    def bounded(layer: Layer) -> Layer:
        return replace(
            layer,
            qkv=replace(layer.qkv, max_rows=max_rows),
            output=replace(layer.output, max_rows=max_rows),
            gate_up=replace(layer.gate_up, max_rows=max_rows),
            down=replace(layer.down, max_rows=max_rows),
        )

    return replace(
        weights,
        layers=tuple(bounded(layer) for layer in weights.layers),
        head=replace(weights.head, max_rows=max_rows),
    )


def check_names(config: ModelConfig, source: TensorSource) -> None:
    """Raise CheckpointError for a tensor that is missing or that nothing uses."""
    wanted = set(config.tensor_shapes())
    found = {name for name in source.names() if not IGNORED.fullmatch(name)}
    if config.tie_word_embeddings:
        found.discard(HEAD)
    if missing := sorted(wanted - found):
        raise CheckpointError(f"tensor {missing[0]} is missing ({len(missing)} missing in all)")
    if unexpected := sorted(found - wanted):
        raise CheckpointError(
            f"tensor {unexpected[0]} is not part of a {config.family} model of this configuration "
            f"({len(unexpected)} unexpected in all)"
        )


def _check_tied_head(source: TensorSource, dtype: torch.dtype, embedding: torch.Tensor) -> None:
    head = source.load(HEAD)
    if head.shape != embedding.shape or not torch.equal(head.to(dtype), embedding):
        raise CheckpointError(
            f"tensor {HEAD} differs from {EMBEDDING}, and tie_word_embeddings is true"
        )


class _Loader:
    """Fetches, checks and fuses the tensors of one checkpoint."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self._config = config
        self._source = source
        self._dtype = dtype
        self._placement = placement
        self._shapes = config.tensor_shapes()
        self.fingerprint = Fingerprint(config)

    def tensor(self, name: str) -> torch.Tensor:
        stored, tensor = load_checked(self._source, name, self._shapes[name], self._dtype)
        self.fingerprint.add(name, stored)
        return tensor

    def norm(self, name: str) -> RmsNorm:
        weight = self._placement.table(self.tensor(name))
        return RmsNorm(weight=weight, eps=self._config.rms_norm_eps)

    def layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention = prefix + "self_attn."
        config, place = self._config, self._placement
        output_bias = (
            place.table(self.tensor(attention + "o_proj.bias"))
            if config.attention_output_bias
            else None
        )
        return Layer(
            input_norm=self.norm(prefix + "input_layernorm.weight"),
            qkv=self._qkv(attention),
            qk_norm=self._qk_norm(attention) if config.qk_norm else None,
            output=RowLinear(
                weight=place.matrix(self.tensor(attention + "o_proj.weight")), bias=output_bias
            ),
            mlp_norm=self.norm(prefix + "post_attention_layernorm.weight"),
            gate_up=ColumnLinear(weight=place.matrix(self._gate_up(prefix + "mlp.")), bias=None),
            down=RowLinear(
                weight=place.matrix(self.tensor(prefix + "mlp.down_proj.weight")), bias=None
            ),
        )

    def _qkv(self, prefix: str) -> ColumnLinear:
        config = self._config
        size = config.query_size + 2 * config.kv_size
        weight = torch.empty(size, config.hidden_size, dtype=self._dtype)
        self._fill_qkv(weight, prefix, "weight")
        bias = None
        if config.attention_bias:
            bias = torch.empty(size, dtype=self._dtype)
            self._fill_qkv(bias, prefix, "bias")
            bias = self._placement.table(bias)
        return ColumnLinear(weight=self._placement.matrix(weight), bias=bias)

    def _fill_qkv(self, fused: torch.Tensor, prefix: str, kind: str) -> None:
        config = self._config
        sizes = [config.query_size, config.kv_size, config.kv_size]
        q, k, v = torch.split(fused, sizes)
        q.copy_(self._paired(self.tensor(f"{prefix}q_proj.{kind}")))
        k.copy_(self._paired(self.tensor(f"{prefix}k_proj.{kind}")))
        v.copy_(self.tensor(f"{prefix}v_proj.{kind}"))

    def _qk_norm(self, prefix: str) -> HeadNorm:
        config = self._config
        q_weight = self._paired(self.tensor(prefix + "q_norm.weight"))
        k_weight = self._paired(self.tensor(prefix + "k_norm.weight"))
        weight = torch.cat(
            (q_weight.expand(config.num_heads, -1), k_weight.expand(config.num_kv_heads, -1))
        )
        return HeadNorm(weight=self._placement.table(weight), eps=config.rms_norm_eps)

    def _gate_up(self, prefix: str) -> torch.Tensor:
        config = self._config
        weight = torch.empty(2 * config.intermediate_size, config.hidden_size, dtype=self._dtype)
        gate, up = weight.chunk(2)
        gate.copy_(self.tensor(prefix + "gate_proj.weight"))
        up.copy_(self.tensor(prefix + "up_proj.weight"))
        return weight

    def _paired(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rows of each head reordered so that a rotation's two elements are neighbours."""
        if self._source.pairs_adjacent:
            return tensor
        return pair_rows(tensor, self._config.head_dim)


def load_checked(
    source: TensorSource, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor as it is stored and in `dtype`. Raises CheckpointError, with its name, for another
    shape, for values that are not finite in `dtype`, and for zeros only.
    """
    stored = source.load(name)
    found = tuple(stored.shape)
    if found != shape:
        raise CheckpointError(f"tensor {name} has shape {list(found)}: must be {list(shape)}")
    tensor = stored.to(dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise CheckpointError(f"tensor {name} has values that are not finite in {dtype}")
    if not bool(tensor.any()):
        raise CheckpointError(f"tensor {name} is all zero")
    return stored, tensor


def pair_rows(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...] with rows (i, i + head_dim / 2) of each head made neighbours."""
    rest = tensor.shape[1:]
    halves = tensor.reshape(-1, 2, head_dim // 2, *rest)
    return halves.transpose(1, 2).reshape(-1, *rest)
