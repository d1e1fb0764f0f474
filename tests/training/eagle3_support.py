"""A tiny head over random features, and drafting chain by chain with the plain equations."""

import math

import numpy as np
import torch

from training.batches import Batch, Batcher, plan_epoch
from training.data import Row, RowSet, join_rows
from training.head import Head, HeadShape
from training.loss import TargetRows, Vocabulary

SHAPE = HeadShape(
    vocab_size=23,
    draft_vocab_size=11,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    rope_scaling=None,
    max_position_embeddings=128,
    layer_ids=(2, 3, 4),
    target_layers=7,
)
DRAFT_IDS = torch.tensor([0, 1, 3, 4, 7, 8, 11, 15, 19, 20, 22])


def random_head(seed: int = 0, shape: HeadShape = SHAPE) -> Head:
    head = Head(shape).double()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(1 + 0.2 * noise if parameter.ndim == 1 else 0.4 * noise)
        assert name
    return head


def random_rows(lengths: list[int], answers: list[int], vocab: int = 23, seed: int = 0) -> RowSet:
    random = np.random.default_rng(seed)
    return join_rows(
        [
            rows_of([Row(random.integers(0, vocab, length), answer)])
            for length, answer in zip(lengths, answers, strict=True)
        ]
    )


def rows_of(rows: list[Row]) -> RowSet:
    lengths = [len(row.tokens) for row in rows]
    return RowSet(
        np.concatenate([np.asarray(row.tokens, dtype=np.int32) for row in rows]),
        np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        np.asarray([row.answer_start for row in rows], dtype=np.int32),
    )


def one_batch(rows: RowSet) -> tuple[np.ndarray, Batch]:
    """All rows in one batch, and which row of the set stands where."""
    (planned,) = plan_epoch(
        rows.lengths, tokens_per_batch=1 << 20, max_length=1024, seed=0, epoch=0
    )
    return planned.rows, Batcher(rows, torch.device("cpu")).build(planned)


def random_target(batch: Batch, dtype: torch.dtype = torch.float64) -> TargetRows:
    generator = torch.Generator().manual_seed(5)
    size = (*batch.tokens.shape, 4 * SHAPE.hidden_size)
    rows = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return TargetRows(rows[..., : 3 * SHAPE.hidden_size], rows[..., 3 * SHAPE.hidden_size :])


def random_vocabulary(dtype: torch.dtype = torch.float64) -> Vocabulary:
    generator = torch.Generator().manual_seed(6)
    size = (2, SHAPE.vocab_size, SHAPE.hidden_size)
    embedding, head = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.full((SHAPE.vocab_size,), -1)
    index[DRAFT_IDS] = torch.arange(len(DRAFT_IDS))
    return Vocabulary(embedding, head[DRAFT_IDS], index)


def norm(row: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return row / torch.sqrt((row * row).mean() + eps) * weight


def rotate(vector: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """One head's vector [head_dim], elements (i, i + head_dim / 2) turned together."""
    half = len(vector) // 2
    out = []
    for index in range(half):
        angle = position * theta ** (-2 * index / len(vector))
        out.append(vector[index] * math.cos(angle) - vector[index + half] * math.sin(angle))
    for index in range(half):
        angle = position * theta ** (-2 * index / len(vector))
        out.append(vector[index + half] * math.cos(angle) + vector[index] * math.sin(angle))
    return torch.stack(out)


class SlowDrafter:
    """One sequence's head with a cache of keys and values, one row at a time."""

    def __init__(self, head: Head, embedding: torch.Tensor) -> None:
        self.head, self.embedding = head, embedding
        self.cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def row(self, token: int, feature: torch.Tensor, position: int) -> torch.Tensor:
        """Run and cache one row; returns y."""
        shape, layer = self.head.shape, self.head.midlayer
        eps = shape.rms_norm_eps
        wide = torch.cat(
            (
                norm(self.embedding[token], layer.input_layernorm.weight, eps),
                norm(feature, layer.hidden_norm.weight, eps),
            )
        )
        attention = layer.self_attn
        query = (attention.q_proj.weight @ wide).view(shape.num_heads, -1)
        key = (attention.k_proj.weight @ wide).view(shape.num_kv_heads, -1)
        value = (attention.v_proj.weight @ wide).view(shape.num_kv_heads, -1)
        key = torch.stack([rotate(one, position, shape.rope_theta) for one in key])
        self.cache.append((key, value))
        outputs = []
        for index in range(shape.num_heads):
            of = index // (shape.num_heads // shape.num_kv_heads)
            turned = rotate(query[index], position, shape.rope_theta)
            scores = torch.stack([turned @ keys[of] for keys, _ in self.cache])
            weights = torch.softmax(scores / math.sqrt(shape.head_dim), 0)
            outputs.append(weights @ torch.stack([values[of] for _, values in self.cache]))
        rows = feature + attention.o_proj.weight @ torch.cat(outputs)
        wide = norm(rows, layer.post_attention_layernorm.weight, eps)
        gate = layer.mlp.gate_proj.weight @ wide
        inner = gate * torch.sigmoid(gate) * (layer.mlp.up_proj.weight @ wide)
        return rows + layer.mlp.down_proj.weight @ inner

    def logits(self, y: torch.Tensor) -> torch.Tensor:
        eps = self.head.shape.rms_norm_eps
        return self.head.lm_head.weight @ norm(y, self.head.norm.weight, eps)
