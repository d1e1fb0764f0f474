"""Linear layers, embedding and head. Callers see whole inputs and outputs; a shard of each weight,
with the sum or gather that it needs, can stand behind the same calls.

Some processors compute a product's rows otherwise beyond some number of rows: `max_rows` then
bounds what is computed in one piece (0: no bound).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# oneDNN lays a weight out for a range of row counts; this one serves decode and prefill alike.
PACKED_FOR_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnLinear:
    """x @ weight.T + bias, whose output features are what shards would divide."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    max_rows: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [rows, in] -> [rows, out]
        return _in_pieces(x, self.weight, self.bias, self.max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLinear:
    """x @ weight.T + bias, whose input features are what shards would divide, then sum."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    max_rows: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [rows, in] -> [rows, out]
        return _in_pieces(x, self.weight, self.bias, self.max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabEmbedding:
    """Token id to hidden state; shards would divide the vocabulary."""

    weight: torch.Tensor  # [vocab_size, hidden_size]

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:  # [rows] -> [rows, hidden_size]
        return self.weight.index_select(0, token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabHead:
    """Hidden state to logits of the whole vocabulary; shards would divide it, then gather."""

    weight: torch.Tensor
    max_rows: int = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [rows, hidden_size] -> [rows, vocab]
        return _in_pieces(x, self.weight, None, self.max_rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmsNorm:
    """Root mean square norm (arXiv 1910.07467) over the last dimension."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head, with a weight of its own for every head."""

    weight: torch.Tensor  # [heads, head_dim]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:  # [rows, heads, head_dim]
        return F.rms_norm(x, self.weight.shape[1:], None, self.eps).mul_(self.weight)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """The weight in oneDNN's blocked layout: for a few rows up to three times as fast as a plain
    one, because a plain weight is laid out anew in every call."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
    return packed


def _in_pieces(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, max_rows: int
) -> torch.Tensor:
    if not max_rows or len(x) <= max_rows:
        return product(x, weight, bias)
    pieces = [x[first : first + max_rows] for first in range(0, len(x), max_rows)]
    return torch.cat([product(piece, weight, bias) for piece in pieces])


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias by the device's own kernel, whatever that makes of the number of rows."""
    if weight.is_cuda:
        return F.linear(x, weight, bias)
    output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return output
