"""Check of a host's GPUs through NVML for lost devices and memory errors; and counts of accelerators."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rallypoint.rpc.text import text_in

# ---- NVML, NVIDIA's library for information about GPUs: its Python binding, and sessions with the driver.


class GpuLibraryError(Exception):
    """NVML's Python binding is not installed; one line."""


class NoDriverError(Exception):
    """The driver does not respond; the text is the library's."""


def gpu_library() -> Any:
    """Import NVML's Python binding. This makes no call to the driver, which may hang if a GPU is broken.

    Raises:
        GpuLibraryError: It is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise GpuLibraryError(
            "NVIDIA's library for GPUs (NVML) is not installed; pip install nvidia-ml-py"
        ) from None


@contextmanager
def driver(nvml: Any) -> Iterator[None]:
    """Open a session with the driver. A new one for each check: results from before a reload of the driver are stale.

    Raises:
        NoDriverError: There is none, or it does not respond.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoDriverError(str(error)) from None
    try:
        yield
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def check_gpus(nvml: Any, visible: str | None) -> str | None:
    """Return the reason if a GPU is not healthy, else None.

    Args:
        visible: CUDA_VISIBLE_DEVICES; None: all GPUs are checked.
    """
    try:
        with driver(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                if (why := _check_gpu(nvml, index, visible)) is not None:
                    return f"GPU {index} {why}"
    except NoDriverError as error:
        return f"the GPU driver does not respond ({error})"
    except nvml.NVMLError as error:
        return f"the GPU driver does not return the number of GPUs ({error})"
    return None


def _check_gpu(nvml: Any, index: int, visible: str | None) -> str | None:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        if not _is_visible(nvml, device, index, visible):
            return None
        with suppress(nvml.NVMLError_NotSupported):
            # The device itself must respond to this, unlike to a request for its name.
            nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        return _memory_errors(nvml, device)
    except nvml.NVMLError as error:
        return f"does not respond ({error})"


def _is_visible(nvml: Any, device: Any, index: int, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if str(index) in names:
        return True
    if all(name.isdigit() for name in names):
        return False
    uuid = str(nvml.nvmlDeviceGetUUID(device))
    # Parts of a GPU (MIG) have names of their own that don't identify the GPU: then all GPUs are checked.
    return any(uuid.startswith(name) or name.startswith("MIG-") for name in names)


def _memory_errors(nvml: Any, device: Any) -> str | None:
    with suppress(nvml.NVMLError_NotSupported):
        errors = nvml.nvmlDeviceGetTotalEccErrors(
            device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        )
        if errors:
            return f"has had {errors} uncorrectable memory errors since it was last reset; reset it"
    with suppress(nvml.NVMLError_NotSupported):
        *_, failed = nvml.nvmlDeviceGetRemappedRows(device)
        if failed:
            return "has rows of memory that could not be remapped; it needs to be replaced"
    return None


# ---- Numbers of the accelerators that this host's workers can use, by kind.


_INTEL = "0x8086"


def count_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Number of GPUs that CUDA or ROCm programs see, as `torch.cuda.device_count()`.

    Args:
        environment: Of the workers; CUDA_VISIBLE_DEVICES (with AMD's driver also HIP_VISIBLE_DEVICES) may hide some.
        root: Folder with /dev and /sys.
    """
    installed = _count_by_nvml() if root == Path("/") else None
    if installed is None:
        installed = sum(1 for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if installed:
        return _visible(environment.get("CUDA_VISIBLE_DEVICES"), installed)
    hidden_by = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    return _visible(hidden_by, _count_amd(root))


def count_xpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Number of Intel GPUs, as `torch.xpu.device_count()` if all of them are of one kind.

    Args:
        environment: Of the workers; ZE_AFFINITY_MASK may hide some.
        root: Folder with /sys.
    """
    nodes = [
        node for node in root.glob("sys/class/drm/renderD*") if text_in(node / "device/vendor") == _INTEL
    ]
    return _visible(environment.get("ZE_AFFINITY_MASK"), len(nodes))


def _count_by_nvml() -> int | None:
    """Number of GPUs by NVIDIA's library; None if the library or its driver is missing."""
    try:
        nvml = gpu_library()
    except GpuLibraryError:
        return None
    try:
        with driver(nvml):
            return int(nvml.nvmlDeviceGetCount())
    except (NoDriverError, nvml.NVMLError):
        return None


def _count_amd(root: Path) -> int:
    """Number of GPUs by AMD's driver: its list also has processors, which have no SIMD unit."""
    properties = (text_in(node / "properties") for node in root.glob("sys/class/kfd/kfd/topology/nodes/*"))
    return sum(1 for text in properties if re.search(r"^simd_count [1-9]", text, re.MULTILINE))


def _visible(text: str | None, installed: int) -> int:
    """Number of devices that a variable leaves visible, by CUDA's rules.

    An invalid name hides itself and all names after it; a name that occurs twice hides all; and of the instances of a
    partitioned GPU (MIG) a process sees only the first.
    """
    if text is None:
        return installed
    seen: set[str] = set()
    for name in (part.strip() for part in text.split(",")):
        if name in seen:
            return 0
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= installed):
            break
        seen.add(name)
    most = 1 if text.startswith("MIG-") else installed
    return min(len(seen), most)
