"""RMS norm (arXiv 1910.07467) of a row, with the residual sum before it in the same pass."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _norm_kernel(  # type: ignore[no-untyped-def]
    delta_pointer,
    stream_pointer,
    weight_pointer,
    out_pointer,
    width,
    eps,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    here = row * width + columns
    stream = tl.load(stream_pointer + here, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_pointer + here, mask=inside, other=0.0)
        # Rounded to the stream's dtype before the norm: the norm is that of what is stored.
        stream = (stream.to(tl.float32) + delta.to(tl.float32)).to(stream.dtype)
        tl.store(stream_pointer + here, stream, mask=inside)
    values = stream.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / width + eps)
    weight = tl.load(weight_pointer + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_pointer + here, (values * scale * weight).to(out_pointer.dtype.element_ty), mask=inside
    )


def add_rms_norm(
    delta: torch.Tensor, stream: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """stream += delta, then out = rms_norm(stream) * weight. All [rows, width] but the weight
    [width]; contiguous. The mean and the product are float32.
    """
    _launch(delta, stream, weight, eps, out, has_delta=True)


def rms_norm(stream: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out = rms_norm(stream) * weight."""
    _launch(stream, stream, weight, eps, out, has_delta=False)


def _launch(
    delta: torch.Tensor,
    stream: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    has_delta: bool,
) -> None:
    rows, width = stream.shape
    block = triton.next_power_of_2(width)
    kernel: Any = _norm_kernel[(rows,)]
    kernel(
        delta, stream, weight, out, width, eps,
        HAS_DELTA=has_delta, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))
