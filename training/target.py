"""A frozen target in plain torch over dense [batch, length] tokens, on CPU and CUDA.

It computes what the engine computes, without its packed weights and paged cache. Training reads
features from it, and generation drives its layers over a cache of its own.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from outrider.engine.boot import read_model
from outrider.engine.errors import CheckpointError
from outrider.engine.model_config import ModelConfig
from outrider.engine.rope import rotation_table
from outrider.engine.tensor_source import TensorSource
from outrider.engine.weights import EMBEDDING, HEAD, check_names, pair_rows

_PAIRED = (
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.q_proj.bias",
    "self_attn.k_proj.bias",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
)


class DenseLayer(nn.Module):
    """One decoder layer. Rows of queries and keys pair elements (2i, 2i + 1) for the rotation."""

    def __init__(self, config: ModelConfig, state: dict[str, torch.Tensor]) -> None:
        """`state` holds the layer's tensors by their Hugging Face names, in paired row order."""
        super().__init__()
        self.config = config
        names = ("q_proj", "k_proj", "v_proj")
        qkv = torch.cat([state[f"self_attn.{name}.weight"] for name in names])
        qkv_bias = head_norm = None
        if config.attention_bias:
            qkv_bias = torch.cat([state[f"self_attn.{name}.bias"] for name in names])
        if config.qk_norm:
            heads = ((config.num_heads, "q_norm"), (config.num_kv_heads, "k_norm"))
            head_norm = torch.cat(
                [state[f"self_attn.{name}.weight"].expand(count, -1) for count, name in heads]
            )
        gate_up = torch.cat([state["mlp.gate_proj.weight"], state["mlp.up_proj.weight"]])
        tensors = {
            "input_norm": state["input_layernorm.weight"],
            "qkv": qkv,
            "qkv_bias": qkv_bias,
            "head_norm": head_norm,
            "output": state["self_attn.o_proj.weight"],
            "output_bias": state.get("self_attn.o_proj.bias"),
            "mlp_norm": state["post_attention_layernorm.weight"],
            "gate_up": gate_up,
            "down": state["mlp.down_proj.weight"],
        }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    head_norm: torch.Tensor | None  # [num_heads + num_kv_heads, head_dim]
    output: torch.Tensor
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor

    def heads(
        self, hidden: torch.Tensor, rotations: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated queries and keys, and values, [..., heads, head_dim] each, of hidden [..., H].

        `rotations` is complex64 [..., 1, head_dim / 2] and broadcasts over the leading sizes.
        """
        config = self.config
        x = F.rms_norm(hidden, self.input_norm.shape, self.input_norm, config.rms_norm_eps)
        qkv = F.linear(x, self.qkv, self.qkv_bias)
        split = qkv.view(*hidden.shape[:-1], -1, config.head_dim)
        num_rotated = config.num_heads + config.num_kv_heads
        states = split[..., :num_rotated, :]
        if self.head_norm is not None:
            states = F.rms_norm(states, (config.head_dim,), None, config.rms_norm_eps)
            states = states * self.head_norm
        pairs = states.float().reshape(*states.shape[:-1], config.head_dim // 2, 2)
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * rotations)
        states = rotated.view(states.shape).to(hidden.dtype)
        q, k = torch.split(states, [config.num_heads, config.num_kv_heads], dim=-2)
        return q, k, split[..., num_rotated:, :]

    def finish(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, [..., H], of its input and attention's [..., query_size]."""
        config = self.config
        hidden = hidden + F.linear(attended, self.output, self.output_bias)
        x = F.rms_norm(hidden, self.mlp_norm.shape, self.mlp_norm, config.rms_norm_eps)
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate).mul_(up), self.down)


class DenseTarget(nn.Module):
    """A target whose dtype and device are those of its loading; nothing in it is trained."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: torch.Tensor,
        head: torch.Tensor,
        final_norm: torch.Tensor,
        layers: Sequence[DenseLayer],
    ) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(layers)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("final_norm", final_norm, persistent=False)
        rotations = rotation_table(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            config.max_position_embeddings,
        )
        self.register_buffer("rotations", rotations.to(embedding.device), persistent=False)

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    head: torch.Tensor  # [vocab_size, hidden_size]
    final_norm: torch.Tensor  # [hidden_size]
    rotations: torch.Tensor  # complex64 [max_position_embeddings, head_dim / 2]

    def layer_state(self, index: int) -> dict[str, torch.Tensor]:
        """Copies of one layer's tensors by Hugging Face name, q and k rows in half-split order."""
        config = self.config
        layer = self.decoder_layer(index)
        sizes = [config.query_size, config.kv_size, config.kv_size]
        gate, up = layer.gate_up.chunk(2)
        state = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.o_proj.weight": layer.output,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
        }
        for kind, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if fused is not None:
                parts = torch.split(fused, sizes)
                for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                    state[f"self_attn.{name}.{kind}"] = part
        if layer.output_bias is not None:
            state["self_attn.o_proj.bias"] = layer.output_bias
        if layer.head_norm is not None:
            state["self_attn.q_norm.weight"] = layer.head_norm[0]
            state["self_attn.k_norm.weight"] = layer.head_norm[-1]
        for name in _PAIRED:
            if name in state:
                state[name] = split_rows(state[name], config.head_dim)
        return {name: tensor.clone() for name, tensor in state.items()}

    def decoder_layer(self, index: int) -> DenseLayer:
        """The layer with this index; raises IndexError for one that the target does not have."""
        layer = self.layers[index]
        assert isinstance(layer, DenseLayer)
        return layer

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm; logits are `normed(hidden) @ head.T`."""
        eps = self.config.rms_norm_eps
        return F.rms_norm(hidden, self.final_norm.shape, self.final_norm, eps)

    @torch.no_grad()
    def forward(
        self, token_ids: torch.Tensor, layer_ids: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and final states of token_ids [B, T], each row from position 0.

        Returns the residual stream entering each of `layer_ids`, side by side in their order,
        [B, T, len(layer_ids) * hidden_size], and the states after the final norm,
        [B, T, hidden_size]. Tokens after a row's end change nothing before it.
        Raises ValueError for a layer or a length that the target does not have.
        """
        config = self.config
        for layer_id in layer_ids:
            if not 0 <= layer_id < config.num_layers:
                raise ValueError(f"layer {layer_id}: must be from 0 to {config.num_layers - 1}")
        length = token_ids.shape[1]
        if length > config.max_position_embeddings:
            raise ValueError(
                f"length is {length}: must be at most {config.max_position_embeddings}"
            )
        rotations = self.rotations[:length].unsqueeze(1)
        hidden = F.embedding(token_ids, self.embedding)
        captured: dict[int, torch.Tensor] = {}
        for index in range(config.num_layers):
            if index in layer_ids:
                captured[index] = hidden
            layer = self.decoder_layer(index)
            q, k, v = layer.heads(hidden, rotations)
            hidden = layer.finish(hidden, causal_attention(q, k, v))
        features = (
            torch.cat([captured[layer_id] for layer_id in layer_ids], dim=-1)
            if layer_ids
            else hidden.new_empty(*token_ids.shape, 0)
        )
        return features, self.normed(hidden)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of [B, T, heads, head_dim] within each row, [B, T, query_size]."""
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
    )
    return attended.transpose(1, 2).flatten(2)


def load_target(
    path: Path, *, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> DenseTarget:
    """Load a checkpoint that the engine reads: a directory of safetensors or a .gguf file.

    Raises CheckpointError or ConfigError, naming what is wrong.
    """
    config, source = read_model(path)
    check_names(config, source)
    shapes = config.tensor_shapes()

    def load(name: str) -> torch.Tensor:
        stored = source.load(name)
        if tuple(stored.shape) != shapes[name]:
            raise CheckpointError(
                f"tensor {name} has shape {list(stored.shape)}: must be {list(shapes[name])}"
            )
        return _paired(config, source, name, stored).to(device=device, dtype=dtype)

    layers = []
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        names = [name for name in shapes if name.startswith(prefix)]
        layers.append(DenseLayer(config, {name.removeprefix(prefix): load(name) for name in names}))
    embedding = load(EMBEDDING)
    return DenseTarget(
        config,
        embedding=embedding,
        head=embedding if config.tie_word_embeddings else load(HEAD),
        final_norm=load("model.norm.weight"),
        layers=layers,
    ).eval()


def split_rows(tensor: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[heads * head_dim, ...] with neighbours (2i, 2i + 1) of each head moved half a head apart."""
    rest = tensor.shape[1:]
    pairs = tensor.reshape(-1, head_dim // 2, 2, *rest)
    return pairs.transpose(1, 2).reshape(-1, *rest)


def _paired(
    config: ModelConfig, source: TensorSource, name: str, stored: torch.Tensor
) -> torch.Tensor:
    if source.pairs_adjacent or not name.endswith(_PAIRED):
        return stored
    return pair_rows(stored, config.head_dim)
