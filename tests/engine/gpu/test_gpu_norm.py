"""The norm kernels against torch's RMS norm in float64."""

import pytest
import torch

EPS = 1e-5


def normed(stream: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMS norm of what is stored, exact but for float64, unrounded."""
    wide = stream.double()
    return wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + EPS) * weight.double()


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Half a unit of the last place, and what float32 arithmetic may add before the rounding."""
    half_unit = torch.finfo(found.dtype).eps / 2
    assert ((found.double() - exact).abs() <= (half_unit + 1e-6) * exact.abs() + 1e-30).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 64, 577, 4608, 16384])
def test_the_norm_is_that_of_the_stored_sum(
    kernel_device: torch.device, dtype: torch.dtype, width: int
) -> None:
    from outrider.engine.gpu.norm_kernel import add_rms_norm, rms_norm

    torch.manual_seed(width)
    delta, stream = (torch.randn(3, width).to(kernel_device, dtype) for _ in range(2))
    weight = (1 + torch.rand(width)).to(kernel_device, dtype)
    total, before = stream + delta, delta.clone()
    out = torch.empty_like(stream)
    add_rms_norm(delta, stream, weight, EPS, out)
    assert torch.equal(stream, total)
    assert torch.equal(delta, before)
    assert_rounded_once(out, normed(total, weight))
    alone = torch.empty_like(stream)
    rms_norm(stream, weight, EPS, alone)
    assert torch.equal(stream, total)
    assert torch.equal(alone, out)


def test_rows_of_zeros_and_of_large_numbers_stay_finite(kernel_device: torch.device) -> None:
    from outrider.engine.gpu.norm_kernel import rms_norm

    stream = torch.tensor([[0.0] * 64, [1e15] * 64, [1e-15] * 64], device=kernel_device)
    weight = torch.full((64,), 2.0, device=kernel_device)
    out = torch.empty_like(stream)
    rms_norm(stream, weight, EPS, out)
    assert_rounded_once(out, normed(stream, weight))
