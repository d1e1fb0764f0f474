"""SwiGLU's gate (arXiv 2002.05202) in one pass."""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_kernel(gate_up_pointer, out_pointer, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    gate = tl.load(gate_up_pointer + row * 2 * size + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_pointer + row * 2 * size + size + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two products, as the CPU's two operations are.
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    product = activated.to(tl.float32) * up.to(tl.float32)
    tl.store(
        out_pointer + row * size + columns, product.to(out_pointer.dtype.element_ty), mask=inside
    )


def silu_gate(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, size] = silu(gate_up[:, :size]) * gate_up[:, size:]; both contiguous."""
    rows, size = out.shape
    kernel: Any = _gate_kernel[(rows, triton.cdiv(size, BLOCK))]
    kernel(gate_up, out, size, BLOCK=BLOCK, num_warps=4)
