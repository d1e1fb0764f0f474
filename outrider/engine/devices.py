"""Boots an engine on the device that its configuration names."""

from outrider.engine.boot import BootReport, Engine, boot
from outrider.engine.config import EngineConfig


def boot_engine(config: EngineConfig, report: BootReport) -> Engine:
    """Raises EngineError naming what is wrong."""
    if config.device == "cpu":
        return boot(config, report)
    # Imported here: its libraries are there only where there is a GPU.
    from outrider.engine.gpu.boot import boot_gpu

    return boot_gpu(config, report)
