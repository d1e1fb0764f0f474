"""The decoder's forward pass over the rows of one step. It knows no batching and no cache."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.engine.attention.interface import AttentionPlan
from outrider.engine.elementwise import row_slices
from outrider.engine.feature_tap import FeatureTap
from outrider.engine.model_config import ModelConfig
from outrider.engine.rope import rotate_in_place
from outrider.engine.weights import DecoderWeights, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Weights and the table of rotations; stateless."""

    config: ModelConfig
    weights: DecoderWeights
    rotations: torch.Tensor  # complex64 [max_sequence_length, head_dim / 2]

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        tap: FeatureTap | None = None,
    ) -> torch.Tensor:
        """The residual stream after the last layer, [rows, hidden_size]. A tap copies what enters
        its layers and changes nothing.
        """
        rotations = self.rotations.index_select(0, positions).unsqueeze(1)
        hidden = self.weights.embedding(token_ids)
        for index, layer in enumerate(self.weights.layers):
            if tap is not None:
                tap.capture(index, hidden)
            qkv = layer.qkv(layer.input_norm(hidden))
            self.rotate(layer, qkv, rotations)
            hidden += layer.output(plan.attend(index, qkv))
            hidden += layer.down(gated(layer.gate_up(layer.mlp_norm(hidden))))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]"""
        return self.weights.head(self.weights.final_norm(hidden))

    def rotate(self, layer: Layer, qkv: torch.Tensor, rotations: torch.Tensor) -> None:
        """Norm (where the model has one) and rotate queries and keys in place."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        heads = qkv.view(qkv.shape[0], -1, config.head_dim)[:, :num_rotated]
        rotate_in_place(heads, rotations, layer.qk_norm)


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [rows, 2 * intermediate_size] (SwiGLU, arXiv 2002.05202)."""
    size = gate_up.shape[1] // 2
    slices = row_slices(gate_up.shape[0], size)
    if len(slices) == 1:
        return F.silu(gate_up[:, :size]).mul_(gate_up[:, size:])
    output = torch.empty_like(gate_up[:, :size])
    for rows in slices:
        output[rows] = F.silu(gate_up[rows, :size]).mul_(gate_up[rows, size:])
    return output
