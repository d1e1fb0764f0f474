"""The forward pass of an EAGLE-3 head (Li et al., arXiv 2503.01840) over the rows of one step.

Row p pairs the embedding of token p + 1 with the feature of position p, and predicts token p + 2.
"""

from dataclasses import dataclass

import torch

from outrider.engine.attention.interface import AttentionPlan
from outrider.engine.eagle3.head_config import Eagle3Config
from outrider.engine.eagle3.head_weights import HeadWeights
from outrider.engine.model import gated
from outrider.engine.rope import rotate_in_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Head:
    """Weights and the table of rotations; stateless."""

    config: Eagle3Config
    weights: HeadWeights
    rotations: torch.Tensor  # complex64 [max_sequence_length, head_dim / 2]

    def hidden_states(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """The residual stream after the layer, [rows, hidden_size].

        features: [rows, hidden_size], projected ones of the target or `next_features`.
        """
        weights, layer = self.weights, self.config.layer
        embedded = weights.embedding_norm(weights.embedding(token_ids))
        normalised = weights.feature_norm(features)
        qkv = weights.qkv(torch.cat((embedded, normalised), dim=1))
        heads = qkv.view(qkv.shape[0], -1, layer.head_dim)
        rotate_in_place(
            heads[:, : layer.num_heads + layer.num_kv_heads],
            self.rotations.index_select(0, positions).unsqueeze(1),
        )
        residual = normalised if self.config.norm_before_residual else features
        hidden = weights.output(plan.attend(0, qkv)).add_(residual)
        hidden += weights.down(gated(weights.gate_up(weights.mlp_norm(hidden))))
        return hidden

    def outputs(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, hidden_size] -> logits [rows, draft_vocab_size] and the features with which the
        next position is drafted, [rows, hidden_size].
        """
        normalised = self.weights.final_norm(hidden)
        logits = self.weights.head(normalised)
        return logits, normalised if self.config.norm_output else hidden
