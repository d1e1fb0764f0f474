"""A trainable EAGLE-3 head: its parameters under their public names, and its equations.

One decoder layer over the pair (embedding of token x_{i+1}, feature f_i of position i), rotary
position i, predicting x_{i+2} over a draft vocabulary (Li et al., arXiv 2503.01840). Rotations pair
elements (i, i + head_dim / 2), as in Hugging Face checkpoints.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.model_config import ModelConfig, usual_feature_layers
from outrider.engine.rope import FrequencyFactors, RopeScaling, rotation_table

# Of the value projection's embedding half at the start: the target's layers have no such input.
EMBEDDING_HALF_STD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head; all but the draft vocabulary and the layers follow from its target."""

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_position_embeddings: int
    layer_ids: tuple[int, ...]  # whose inputs are the captured features
    target_layers: int


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """The layers that every engine assumes where nothing is said. Raises ValueError for a target so
    shallow that they coincide.
    """
    layer_ids = usual_feature_layers(num_layers)
    if not 2 < layer_ids[1] < layer_ids[2]:
        raise ValueError(
            f"the target has {num_layers} layers: with fewer than 7 the layers to capture must be "
            "named"
        )
    return layer_ids


def head_shape(
    target: ModelConfig, *, draft_vocab_size: int, layer_ids: tuple[int, ...]
) -> HeadShape:
    """The head for a target; raises ValueError for layers that the target does not have."""
    if list(layer_ids) != sorted(set(layer_ids)) or not layer_ids:
        raise ValueError(f"layer ids {layer_ids} must ascend without repeats")
    if not 0 <= layer_ids[0] <= layer_ids[-1] < target.num_layers:
        raise ValueError(f"layer ids {layer_ids} must be 0 to {target.num_layers - 1}")
    scaling = target.rope_scaling
    # A config.json has no field for free factors; the head's own rotation need not be the target's.
    if isinstance(scaling, FrequencyFactors):
        scaling = None
    return HeadShape(
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=scaling,
        max_position_embeddings=target.max_position_embeddings,
        layer_ids=layer_ids,
        target_layers=target.num_layers,
    )


class Weight(nn.Module):
    """One tensor called `weight`."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))


class SelfAttention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        query_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.q_proj = Weight(query_size, 2 * shape.hidden_size)
        self.k_proj = Weight(kv_size, 2 * shape.hidden_size)
        self.v_proj = Weight(kv_size, 2 * shape.hidden_size)
        self.o_proj = Weight(shape.hidden_size, query_size)


class Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = Weight(shape.intermediate_size, shape.hidden_size)
        self.up_proj = Weight(shape.intermediate_size, shape.hidden_size)
        self.down_proj = Weight(shape.hidden_size, shape.intermediate_size)


class MidLayer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.input_layernorm = Weight(shape.hidden_size)
        self.hidden_norm = Weight(shape.hidden_size)
        self.self_attn = SelfAttention(shape)
        self.post_attention_layernorm = Weight(shape.hidden_size)
        self.mlp = Mlp(shape)


class Head(nn.Module):
    """Parameters in float32 (or wider); `cast` gives what a forward pass computes with."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Weight(shape.hidden_size, len(shape.layer_ids) * shape.hidden_size)
        self.midlayer = MidLayer(shape)
        self.norm = Weight(shape.hidden_size)
        self.lm_head = Weight(shape.draft_vocab_size, shape.hidden_size)

    def cast(self, dtype: torch.dtype) -> "CastHead":
        """The parameters in `dtype`, fused for speed; gradients reach the parameters."""
        layer, attention = self.midlayer, self.midlayer.self_attn
        width = self.shape.hidden_size
        qkv = torch.cat(
            (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        ).to(dtype)
        mlp = layer.mlp
        return CastHead(
            shape=self.shape,
            fc=self.fc.weight.to(dtype),
            embedding_norm=layer.input_layernorm.weight.to(dtype),
            feature_norm=layer.hidden_norm.weight.to(dtype),
            qkv_of_embedding=qkv[:, :width],
            qkv_of_feature=qkv[:, width:],
            output=attention.o_proj.weight.to(dtype),
            mlp_norm=layer.post_attention_layernorm.weight.to(dtype),
            gate_up=torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).to(dtype),
            down=mlp.down_proj.weight.to(dtype),
            final_norm=self.norm.weight.to(dtype),
            lm_head=self.lm_head.weight,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CastHead:
    """A head's tensors for one forward pass. Rows are [batch, length, hidden_size]."""

    shape: HeadShape
    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    qkv_of_embedding: torch.Tensor  # [query_size + 2 * kv_size, hidden_size]
    qkv_of_feature: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    final_norm: torch.Tensor
    lm_head: torch.Tensor  # the parameter itself: the loss casts it

    def project(self, captured: torch.Tensor) -> torch.Tensor:
        """f = fc(g) of captured features [batch, length, layers * hidden_size]."""
        return F.linear(captured, self.fc)

    def embedding_part(self, embedded: torch.Tensor) -> torch.Tensor:
        """What the tokens' embeddings add to queries, keys and values before rotation."""
        return F.linear(self._normed(embedded, self.embedding_norm), self.qkv_of_embedding)

    def attention_inputs(
        self, feature: torch.Tensor, embedding_part: torch.Tensor, rotation: "Rotation"
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated query, rotated key and value, each [batch, heads or kv_heads, length, head_dim].

        `rotation` holds the rotary position of every row.
        """
        shape = self.shape
        qkv = F.linear(self._normed(feature, self.feature_norm), self.qkv_of_feature)
        rows = (qkv + embedding_part).view(*qkv.shape[:2], -1, shape.head_dim)
        rotated = rotation.apply(rows[:, :, : shape.num_heads + shape.num_kv_heads])
        query, key = torch.split(rotated, [shape.num_heads, shape.num_kv_heads], 2)
        value = rows[:, :, shape.num_heads + shape.num_kv_heads :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def finish(self, feature: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """y: the residual stream after attention [batch, heads, length, head_dim] and MLP.

        It is the next step's feature, and `normed_output` of it what the draft vocabulary sees.
        """
        rows = feature + F.linear(attended.transpose(1, 2).flatten(2), self.output)
        gate, up = F.linear(self._normed(rows, self.mlp_norm), self.gate_up).chunk(2, -1)
        return rows + F.linear(F.silu(gate) * up, self.down)

    def normed_output(self, rows: torch.Tensor) -> torch.Tensor:
        return self._normed(rows, self.final_norm)

    def _normed(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(rows, weight.shape, weight, self.shape.rms_norm_eps)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions of a run of rows: cosines and sines [length, 1, head_dim / 2]."""

    cosines: torch.Tensor
    sines: torch.Tensor

    def apply(self, rows: torch.Tensor) -> torch.Tensor:  # [batch, length, heads, head_dim]
        low, high = rows.chunk(2, -1)
        rotated = torch.cat(
            (low * self.cosines - high * self.sines, high * self.cosines + low * self.sines), -1
        )
        return rotated.to(rows.dtype)

    def span(self, first: int, length: int) -> "Rotation":
        """Positions first .. first + length - 1."""
        end = first + length
        assert end <= len(self.cosines)
        return Rotation(self.cosines[first:end], self.sines[first:end])


def rotation_of(
    shape: HeadShape, length: int, *, device: torch.device, dtype: torch.dtype = torch.float32
) -> Rotation:
    """Positions 0 .. length - 1 of a head's rotary embedding."""
    table = rotation_table(shape.head_dim, shape.rope_theta, shape.rope_scaling, length)[:, None]
    return Rotation(table.real.to(device, dtype), table.imag.to(device, dtype))


@torch.no_grad()
def initialise(
    head: Head,
    *,
    last_layer: Mapping[str, torch.Tensor],
    final_norm: torch.Tensor,
    draft_rows: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Start from the target: its last layer reads the highest captured stream as its input.

    `last_layer` has the names of a Hugging Face layer (`self_attn.q_proj.weight`), `draft_rows`
    [draft_vocab_size, hidden_size] are the rows of the target's output head. The embedding's half
    starts at zero for queries and keys and small for values, so the first drafts are those of a
    target that skips the layers in between.
    """
    width = head.shape.hidden_size
    layer = head.midlayer
    head.fc.weight.zero_()
    head.fc.weight[:, -width:].fill_diagonal_(1.0)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(layer.self_attn, name).weight
        weight.zero_()
        weight[:, width:].copy_(last_layer[f"self_attn.{name}.weight"])
    embedding_half = layer.self_attn.v_proj.weight[:, :width]
    noise = torch.randn(embedding_half.shape, generator=generator) * EMBEDDING_HALF_STD
    embedding_half.copy_(noise)
    layer.self_attn.o_proj.weight.copy_(last_layer["self_attn.o_proj.weight"])
    layer.input_layernorm.weight.fill_(1.0)
    layer.hidden_norm.weight.copy_(last_layer["input_layernorm.weight"])
    layer.post_attention_layernorm.weight.copy_(last_layer["post_attention_layernorm.weight"])
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(layer.mlp, name).weight.copy_(last_layer[f"mlp.{name}.weight"])
    head.norm.weight.copy_(final_norm)
    head.lm_head.weight.copy_(draft_rows)
