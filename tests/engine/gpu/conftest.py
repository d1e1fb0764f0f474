"""Where kernels run in these tests: a GPU, or the CPU through Triton's interpreter."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The GPU where there is one, else the CPU if Triton interprets (TRITON_INTERPRET=1)."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1")
    return torch.device("cuda", 0)
