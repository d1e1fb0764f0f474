"""EAGLE-3 written down from its equations (arXiv 2503.01840), in float64: every row computed anew,
no cache, rotations over the halves of a head as in the published checkpoints.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tests.engine.head_checkpoint import (
    EPS,
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    HeadFiles,
    target_tensors,
)

LAYER = "layers.0."


class ReferenceHead:
    """A head as its files describe it."""

    def __init__(self, files: HeadFiles) -> None:
        self.settings = files.settings
        self.is_of_speculators = "speculators_model_type" in files.settings
        self.rope = files.layer_settings or files.settings
        self.tensors = {name: tensor.double() for name, tensor in files.tensors.items()}
        target = target_tensors()["model.embed_tokens.weight"].double()
        self.embedding = self.tensors.get("embed_tokens.weight", target)
        self.lm_head = self.tensors.get("lm_head.weight", target)
        self.target_ids = np.arange(len(self.lm_head))
        if "d2t" in files.tensors:
            self.target_ids = self.target_ids + files.tensors["d2t"].numpy()

    def project(self, captured: torch.Tensor) -> torch.Tensor:
        """[rows, layers * hidden_size] -> [rows, hidden_size]"""
        captured = captured.double()
        if self.settings.get("norm_before_fc"):
            captured = self._norm("input_norm", captured)
        if self.settings.get("fc_norm") or self.settings.get("use_aux_norm"):
            parts = captured.chunk(3, dim=1)
            captured = torch.cat(
                [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)], dim=1
            )
        return self._linear("fc", captured)

    def rows(
        self, token_ids: Sequence[int], features: torch.Tensor, first_position: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and next features of the rows of consecutive positions.

        token_ids[i] is the token behind position first_position + i, features[i] its feature.
        """
        features = features.double()
        count = len(features)
        embedded = self._norm(LAYER + "input_layernorm", self.embedding[list(token_ids)])
        normalised = self._norm(LAYER + "hidden_norm", features)
        both = torch.cat((embedded, normalised), dim=1)
        heads = [
            self._linear(f"{LAYER}self_attn.{name}_proj", both).view(count, -1, HEAD_DIM)
            for name in "qkv"
        ]
        positions = torch.arange(first_position, first_position + count)
        query, key = (self._rotated(part, positions) for part in heads[:2])
        group = NUM_HEADS // NUM_KV_HEADS
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, heads[2]))
        scores = torch.einsum("qhd,khd->hqk", query, key) * HEAD_DIM**-0.5
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
        attended = torch.einsum("hqk,khd->qhd", weights, value).reshape(count, -1)
        normalised_first = self.settings.get("norm_before_residual", self.is_of_speculators)
        residual = normalised if normalised_first else features
        residual = residual + self._linear(LAYER + "self_attn.o_proj", attended)
        inner = self._norm(LAYER + "post_attention_layernorm", residual)
        gate = self._linear(LAYER + "mlp.gate_proj", inner)
        up = self._linear(LAYER + "mlp.up_proj", inner)
        y = residual + self._linear(LAYER + "mlp.down_proj", gate * torch.sigmoid(gate) * up)
        final = self._norm("norm", y)
        return final @ self.lm_head.T, final if self.settings.get("norm_output") else y

    def draft_logits(
        self,
        token_ids: Sequence[int],
        features: torch.Tensor,
        first_position: int,
        draft: Sequence[int],
    ) -> list[np.ndarray]:
        """The logits of every draft position behind the text, where `draft` was drawn.

        features: true ones, of first_position up to the position before the last token's.
        """
        assert first_position + len(features) == len(token_ids) - 1
        text = list(token_ids)
        logits = []
        for token_id in draft:
            rows, outputs = self.rows(text[first_position + 1 :], features, first_position)
            logits.append(rows[-1].numpy())
            text.append(token_id)
            features = torch.cat((features.double(), outputs[-1:]))
        return logits

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = HEAD_DIM // 2
        scaling = self.rope.get("rope_scaling") or {"factor": 1.0}
        frequencies = self.rope["rope_theta"] ** (-torch.arange(half).double() / half)
        angles = torch.outer(positions.double(), frequencies / scaling["factor"])[:, None]
        left, right = heads[..., :half], heads[..., half:]
        return torch.cat(
            (
                left * angles.cos() - right * angles.sin(),
                right * angles.cos() + left * angles.sin(),
            ),
            dim=-1,
        )

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = torch.sqrt((x * x).mean(dim=-1, keepdim=True) + EPS)
        return x / scale * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return product if bias is None else product + bias
