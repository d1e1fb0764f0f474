"""What a GPU's driver says of it: memory, utilisation and power, read in a thread of its own.

A reading may take milliseconds, which neither the event loop nor an engine's thread has.
"""

import logging
import threading
from typing import Any

from outrider.v1 import status_pb2

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0


class GpuMonitor:
    """The last figures of one GPU."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """`nvml`: the module pynvml; `uuid` as the driver writes it, `GPU-...`. Raises NVMLError
        where the driver does not know the GPU.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._figures = self._read()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        self._thread.start()

    def figures(self) -> status_pb2.GpuFigures:
        """At most a period old, while the driver answers."""
        return self._figures

    def stop(self) -> None:
        """Ends the thread."""
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(PERIOD_SECONDS):
            try:
                self._figures = self._read()
            except self._nvml.NVMLError as error:
                logger.warning("the GPU's driver does not answer any more: %s", error)
                return

    def _read(self) -> status_pb2.GpuFigures:
        nvml, handle = self._nvml, self._handle
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        figures = status_pb2.GpuFigures(
            name=_text(nvml.nvmlDeviceGetName(handle)),
            driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
            memory_used_bytes=memory.used,
            memory_total_bytes=memory.total,
        )
        # Some GPUs, and parts of GPUs, have no such counters.
        try:
            figures.utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100
        except nvml.NVMLError_NotSupported:
            pass
        try:
            figures.power_watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        except nvml.NVMLError_NotSupported:
            pass
        return figures


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def monitor_gpu(uuid: str) -> GpuMonitor | None:
    """A monitor of a GPU; None, with a warning, where nobody can ask its driver."""
    try:
        import pynvml
    except ImportError:
        logger.warning("no figures of the GPU: nvidia-ml-py is not installed")
        return None
    try:
        return GpuMonitor(pynvml, uuid)
    except pynvml.NVMLError as error:
        logger.warning("no figures of the GPU: %s", error)
        return None
