"""The gate kernel against the CPU engine's two operations."""

import pytest
import torch

from outrider.engine.model import gated

# The interpreter's exponential of a large number warns; its infinity is what the kernel wants.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 577, 1024, 3000])
def test_the_gate_is_that_of_the_cpu_engine(
    kernel_device: torch.device, dtype: torch.dtype, size: int
) -> None:
    from outrider.engine.gpu.gate_kernel import silu_gate

    torch.manual_seed(size)
    gate_up = (torch.randn(5, 2 * size) * 4).to(dtype)
    gate_up[0, :size] = 100.0
    gate_up[1, :size] = -100.0
    gate_up[2, :size] = 0.0
    out = torch.empty(5, size, dtype=dtype, device=kernel_device)
    silu_gate(gate_up.to(kernel_device), out)
    wanted = gated(gate_up)
    # Either activation may be rounded to the other neighbour, and the product once more.
    epsilon = torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu(), wanted, rtol=2 * epsilon + 1e-6, atol=1e-30)
    assert (out.cpu() == wanted).float().mean() > (0.99 if dtype == torch.bfloat16 else 0.3)
