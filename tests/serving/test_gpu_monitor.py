"""Figures of a GPU from a driver that is laid down."""

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.serving import gpu_monitor
from outrider.serving.gpu_monitor import monitor_gpu

UUID = "GPU-12345678-aaaa-bbbb-cccc-1234567890ab"


class NVMLError(Exception):
    """As the library's."""


class NVMLError_NotSupported(NVMLError):
    """As the library's."""


class FakeDriver(SimpleNamespace):
    """What the monitor asks of pynvml."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported

    def __init__(self, **values: Any) -> None:
        super().__init__(used=2**30, power=87_500, utilization=43, name="NVIDIA H200", **values)
        self.is_gone = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        if self.is_gone:
            raise NVMLError("GPU is lost")
        return SimpleNamespace(used=self.used, total=141 * 2**30)

    def nvmlDeviceGetName(self, handle: str) -> str:
        return str(self.name)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.159"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if self.utilization is None:
            raise NVMLError_NotSupported
        return SimpleNamespace(gpu=self.utilization)

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        if self.power is None:
            raise NVMLError_NotSupported
        return int(self.power)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver = FakeDriver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(gpu_monitor, "PERIOD_SECONDS", 0.01)
    return driver


def wait_for(condition: Any) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_figures_are_the_drivers_and_follow_it(driver: FakeDriver) -> None:
    monitor = monitor_gpu(UUID)
    assert monitor is not None
    figures = monitor.figures()
    assert (figures.name, figures.driver_version) == ("NVIDIA H200", "580.159")
    assert (figures.memory_used_bytes, figures.memory_total_bytes) == (2**30, 141 * 2**30)
    assert figures.utilization == pytest.approx(0.43)
    assert figures.power_watts == pytest.approx(87.5)
    driver.used = 3 * 2**30
    wait_for(lambda: monitor.figures().memory_used_bytes == 3 * 2**30)
    monitor.stop()


def test_what_a_gpu_does_not_count_is_absent(driver: FakeDriver) -> None:
    driver.utilization = driver.power = None
    monitor = monitor_gpu(UUID)
    assert monitor is not None
    figures = monitor.figures()
    assert not figures.HasField("utilization") and not figures.HasField("power_watts")
    assert figures.memory_used_bytes == 2**30
    monitor.stop()


def test_a_driver_that_is_lost_later_leaves_the_last_figures_and_a_warning(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = monitor_gpu(UUID)
    assert monitor is not None
    driver.is_gone = True
    wait_for(lambda: "does not answer any more: GPU is lost" in caplog.text)
    assert monitor.figures().memory_used_bytes == 2**30
    monitor.stop()


def test_a_gpu_that_the_driver_does_not_know_is_said_and_goes_without(
    driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    assert monitor_gpu("GPU-other") is None
    assert "no figures of the GPU: Not Found" in caplog.text


def test_without_the_library_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert monitor_gpu(UUID) is None
    assert "nvidia-ml-py is not installed" in caplog.text
