"""Lost GPUs, or GPUs with unreliable memory, make their host unhealthy; GPUs of other jobs don't."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from rallypoint.agent.health.checks import CheckContext, parse_health_check
from rallypoint.agent.health.gpu import check_gpus


@dataclass
class Gpu:
    """One of the host's GPUs."""

    lost: bool = False
    errors: int | None = 0
    remap_failed: int | None = 0


class Nvml:
    """The part of NVML that is used, for a host with these GPUs."""

    class NVMLError(Exception):
        """Base of its errors."""

    class NVMLError_NotSupported(NVMLError):  # NVML's own name
        """The device has no such value."""

    class NVMLError_GpuIsLost(NVMLError):
        """It fell off the bus."""

    NVML_TEMPERATURE_GPU = NVML_MEMORY_ERROR_TYPE_UNCORRECTED = NVML_VOLATILE_ECC = 0

    def __init__(self, *gpus: Gpu, driver: bool = True) -> None:
        """Build it with these GPUs, with or without a driver."""
        self._gpus, self._driver = gpus, driver
        self.begun = self.ended = 0

    def nvmlInit(self) -> None:
        if not self._driver:
            raise self.NVMLError("Driver Not Loaded")
        self.begun += 1

    def nvmlShutdown(self) -> None:
        self.ended += 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self._gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self._gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return f"GPU-{self._gpus.index(gpu)}f3a"

    def nvmlDeviceGetTemperature(self, gpu: Gpu, _: int) -> int:
        if gpu.lost:
            raise self.NVMLError_GpuIsLost("GPU is lost")
        return 40

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, *_: int) -> int:
        return self._figure(gpu.errors)

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        """Return NVML's tuple: rows remapped for corrected and uncorrected errors, pending, failed."""
        return (0, 0, 0, self._figure(gpu.remap_failed))

    def _figure(self, figure: int | None) -> int:
        if figure is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return figure


FINE = Gpu()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (Gpu(lost=True), "GPU 1 does not respond (GPU is lost)"),
        (Gpu(errors=2), "GPU 1 has had 2 uncorrectable memory errors since it was last reset; reset it"),
        (Gpu(remap_failed=1), "GPU 1 has rows of memory that could not be remapped; it needs to be replaced"),
    ],
)
def test_a_gpu_that_is_not_healthy_is_named(bad: Gpu, why: str) -> None:
    """The text has the remedy."""
    assert check_gpus(Nvml(Gpu(), bad), None) == why


def test_healthy_gpus_are() -> None:
    """GPUs without these values are healthy too: a consumer's card counts no errors."""
    assert check_gpus(Nvml(Gpu(), Gpu(errors=None, remap_failed=None)), None) is None
    assert check_gpus(Nvml(), None) is None


@pytest.mark.parametrize(
    ("visible", "counts"),
    [
        ("0", False),
        ("1", True),
        ("0,1", True),
        ("GPU-0f3a", False),
        ("GPU-1f", True),
        ("MIG-77", True),
        ("", False),
    ],
)
def test_the_gpus_of_other_jobs_don_t_count(visible: str, counts: bool) -> None:
    """CUDA_VISIBLE_DEVICES selects this job's GPUs, by number or by name."""
    assert (check_gpus(Nvml(Gpu(), Gpu(lost=True)), visible) is not None) is counts


def test_a_driver_that_is_not_loaded_makes_its_host_unhealthy() -> None:
    """The job needs GPUs, and this host has none to offer."""
    assert check_gpus(Nvml(driver=False), None) == "the GPU driver does not respond (Driver Not Loaded)"


def test_the_driver_is_initialized_for_each_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shut down after each check, also after an error."""
    nvml = Nvml(Gpu(), Gpu(lost=True))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    look = parse_health_check("gpu").check
    assert look is not None
    assert look(CheckContext(visible_gpus="0")) is None
    assert look(CheckContext()) == "GPU 1 does not respond (GPU is lost)"
    assert (nvml.begun, nvml.ended) == (2, 2)
