"""An EAGLE-3 head's layer on a GPU (Li et al., arXiv 2503.01840; rows as in `eagle3.head`).

Nothing here allocates beside torch's allocator or waits for the device, so it can be captured.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.engine.eagle3.head_config import Eagle3Config
from outrider.engine.eagle3.head_weights import HeadWeights
from outrider.engine.gpu.gate_kernel import silu_gate
from outrider.engine.gpu.kv_cache import GpuKvCache
from outrider.engine.gpu.norm_kernel import add_rms_norm, rms_norm
from outrider.engine.gpu.rotate_kernel import rotate_and_store
from outrider.engine.layers import RmsNorm

# Writes the attention of qkv's queries, whose keys are in the cache, to its second argument.
Attend = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHead:
    """Weights and the table of rotations on one device; stateless but for the cache."""

    config: Eagle3Config
    weights: HeadWeights
    rotations: torch.Tensor  # float32 [max_sequence_length, head_dim / 2, 2]: cosine, sine
    cache: GpuKvCache  # of one layer

    def run(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        attend: Attend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows behind the layer, normed for the output head, and the features with which the
        next position is drafted; [rows, hidden_size] both.

        token_ids, positions, slots: int32 [rows]; a token id below 0 counts as 0. features:
        [rows, hidden_size], projected ones of the target or these.
        """
        weights, layer, cache = self.weights, self.config.layer, self.cache
        embedded = weights.embedding.weight.index_select(0, token_ids.clamp(min=0))
        normed_feature = _normed(features, weights.feature_norm)
        both = torch.cat((_normed(embedded, weights.embedding_norm), normed_feature), dim=1)
        qkv = F.linear(both, weights.qkv.weight, weights.qkv.bias)
        rotate_and_store(
            qkv,
            positions,
            self.rotations,
            slots,
            cache.keys[0],
            cache.values[0],
            layer.num_heads,
            layer.num_kv_heads,
            None,
            0.0,
        )
        attended = torch.empty(qkv.shape[0], layer.query_size, dtype=qkv.dtype, device=qkv.device)
        attend(qkv, attended)
        delta = F.linear(attended, weights.output.weight, weights.output.bias)
        stream = normed_feature if self.config.norm_before_residual else features.clone()
        normed = torch.empty_like(stream)
        add_rms_norm(delta, stream, weights.mlp_norm.weight, weights.mlp_norm.eps, normed)
        gate_up = F.linear(normed, weights.gate_up.weight)
        gated = torch.empty(
            gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device
        )
        silu_gate(gate_up, gated)
        delta = F.linear(gated, weights.down.weight)
        add_rms_norm(delta, stream, weights.final_norm.weight, weights.final_norm.eps, normed)
        return normed, normed if self.config.norm_output else stream

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] -> [rows, draft_vocab_size]"""
        return F.linear(normed, self.weights.head.weight)


def _normed(rows: torch.Tensor, norm: RmsNorm) -> torch.Tensor:
    out = torch.empty_like(rows)
    rms_norm(rows, norm.weight, norm.eps, out)
    return out
