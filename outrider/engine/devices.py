"""The device that a configuration names: an engine booted on it, and what its driver calls it."""

import torch

from outrider.engine.boot import BootReport, Engine, Stage, boot
from outrider.engine.config import EngineConfig, validate
from outrider.engine.gpu.device import find_device


def boot_engine(config: EngineConfig, report: BootReport) -> Engine:
    """Raises EngineError naming what is wrong."""
    if config.device == "cpu":
        return boot(config, report)
    report.enter(Stage.CONFIG)
    validate(config)
    # Before the imports, whose own words for a missing library name no remedy.
    find_device(config.device)
    # Imported here: its libraries are there only where there is a GPU.
    from outrider.engine.gpu.boot import boot_gpu

    return boot_gpu(config, report)


def gpu_uuid(device: str) -> str:
    """What the driver calls a GPU, whichever of them this process sees; empty for a CPU."""
    if device == "cpu":
        return ""
    return f"GPU-{torch.cuda.get_device_properties(torch.device(device)).uuid}"
