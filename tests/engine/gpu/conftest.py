"""Where kernels run in these tests: a GPU, or the CPU through Triton's interpreter; and an engine
on a GPU.
"""

import os

import pytest
import torch

from outrider.engine.boot import Engine
from outrider.engine.config import EngineConfig
from outrider.engine.devices import boot_engine
from tests.engine.engine_support import RecordingReport, default_model_path


@pytest.fixture(scope="session")
def kernel_device() -> torch.device:
    """The GPU where there is one, else the CPU if Triton interprets (TRITON_INTERPRET=1)."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU, or TRITON_INTERPRET=1")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton")
    pytest.importorskip("flashinfer")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def engine(device: torch.device) -> Engine:
    config = EngineConfig(
        model_path=default_model_path(),
        device="cuda",
        kv_cache_bytes=2**30,
        max_sequences=8,
        max_draft_length=5,
    )
    return boot_engine(config, RecordingReport())
