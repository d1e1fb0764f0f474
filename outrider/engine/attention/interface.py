"""What the decoder knows of attention: rows are planned once per step, then attended per layer."""

from typing import Protocol

import torch

from outrider.engine.step import StepRows


class AttentionPlan(Protocol):
    """One step's rows, ready to attend in any layer."""

    def attend(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """Write the rows' keys and values to the cache, then attend causally.

        qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim], queries and keys already rotated.
        Returns [rows, num_heads * head_dim]; what padding rows hold is finite and meaningless.
        """
        ...


class Attention(Protocol):
    """A backend over one KV cache. A row's result depends on its sequence's tokens alone."""

    @property
    def kv_granularity(self) -> int:
        """Long contexts are attended in units of this many tokens."""
        ...

    def plan(self, rows: StepRows) -> AttentionPlan: ...
