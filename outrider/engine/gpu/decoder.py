"""The decoder's forward pass on a GPU: cuBLAS products with one fused kernel between each two.

Nothing here allocates beside torch's allocator or waits for the device, so it can be captured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from outrider.engine.gpu.flashinfer_attention import FlashInferAttention
from outrider.engine.gpu.gate_kernel import silu_gate
from outrider.engine.gpu.kv_cache import GpuKvCache
from outrider.engine.gpu.norm_kernel import add_rms_norm, rms_norm
from outrider.engine.gpu.rotate_kernel import rotate_and_store
from outrider.engine.gpu.step_inputs import StepInputs
from outrider.engine.layers import RmsNorm
from outrider.engine.model_config import ModelConfig
from outrider.engine.weights import DecoderWeights, Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """Where the residual streams that enter some layers are copied."""

    rows: torch.Tensor  # [max_rows, len(layer_ids) * hidden_size]
    layer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDecoder:
    """Weights and the table of rotations on one device; stateless but for the cache."""

    config: ModelConfig
    weights: DecoderWeights
    rotations: torch.Tensor  # float32 [max_sequence_length, head_dim / 2, 2]: cosine, sine
    cache: GpuKvCache
    capture: Capture | None = None

    def hidden_states(self, rows: StepInputs, attention: FlashInferAttention) -> torch.Tensor:
        """The residual stream after the last layer, normed for the head: [rows, hidden_size]."""
        weights = self.weights
        stream = weights.embedding.weight.index_select(0, rows.token_ids)
        normed = torch.empty_like(stream)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(weights.layers):
            self._norm(delta, stream, layer.input_norm, normed)
            self._keep(index, stream)
            delta = self._attend(index, layer, normed, rows, attention)
            self._norm(delta, stream, layer.mlp_norm, normed)
            delta = self._mlp(layer, normed)
        self._norm(delta, stream, weights.final_norm, normed)
        return normed

    def logits(self, normed: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size], as `hidden_states` gives them -> `out` [rows, vocab_size]"""
        return torch.mm(normed, self.weights.head.weight.T, out=out)

    def _norm(
        self, delta: torch.Tensor | None, stream: torch.Tensor, norm: RmsNorm, out: torch.Tensor
    ) -> None:
        """stream += delta (nothing before the first layer); out = norm(stream)."""
        if delta is None:
            rms_norm(stream, norm.weight, norm.eps, out)
        else:
            add_rms_norm(delta, stream, norm.weight, norm.eps, out)

    def _keep(self, index: int, stream: torch.Tensor) -> None:
        capture = self.capture
        if capture is None or index not in capture.layer_ids:
            return
        width = self.config.hidden_size
        first = capture.layer_ids.index(index) * width
        capture.rows[: stream.shape[0], first : first + width].copy_(stream)

    def _attend(
        self,
        index: int,
        layer: Layer,
        normed: torch.Tensor,
        rows: StepInputs,
        attention: FlashInferAttention,
    ) -> torch.Tensor:
        config, cache = self.config, self.cache
        qkv = F.linear(normed, layer.qkv.weight, layer.qkv.bias)
        norm = layer.qk_norm
        rotate_and_store(
            qkv,
            rows.positions,
            self.rotations,
            rows.slots,
            cache.keys[index],
            cache.values[index],
            config.num_heads,
            config.num_kv_heads,
            None if norm is None else norm.weight,
            0.0 if norm is None else norm.eps,
        )
        output = torch.empty(qkv.shape[0], config.query_size, dtype=qkv.dtype, device=qkv.device)
        attention.attend(index, qkv, output)
        return F.linear(output, layer.output.weight, layer.output.bias)

    def _mlp(self, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(normed, layer.gate_up.weight)
        gated = torch.empty(
            gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device
        )
        silu_gate(gate_up, gated)
        return F.linear(gated, layer.down.weight)
