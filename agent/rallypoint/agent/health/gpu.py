"""Checks a host's GPUs through NVML: that none is lost, or has memory that can't be relied on."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# ---- NVML, NVIDIA's library that tells of GPUs: its Python binding, and a talk with the driver.


class GpuLibraryError(Exception):
    """The library that looks at GPUs is not there; one line."""


class NoDriverError(Exception):
    """No driver answers; why, in the library's words."""


def gpu_library() -> Any:
    """NVML's Python binding. It asks no driver yet: that may hang, where a GPU is sick.

    Raises:
        GpuLibraryError: It is not installed.
    """
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        raise GpuLibraryError(
            "the library that looks at GPUs is not installed; pip install nvidia-ml-py"
        ) from None


@contextmanager
def driver(nvml: Any) -> Iterator[None]:
    """A talk with the driver. Anew each time: what it found before it was loaded again says nothing.

    Args:
        nvml: The library.

    Raises:
        NoDriverError: There is none, or it does not answer.
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
    """Why the GPUs are not healthy; None if they are.

    Args:
        nvml: The library.
        visible: CUDA_VISIBLE_DEVICES; None: all count.
    """
    try:
        with driver(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                if (why := _check_gpu(nvml, index, visible)) is not None:
                    return f"GPU {index} {why}"
    except NoDriverError as error:
        return f"no driver answers ({error})"
    except nvml.NVMLError as error:
        return f"the driver does not say how many there are ({error})"
    return None


def _check_gpu(nvml: Any, index: int, visible: str | None) -> str | None:
    try:
        device = nvml.nvmlDeviceGetHandleByIndex(index)
        if not _is_visible(nvml, device, index, visible):
            return None
        with suppress(nvml.NVMLError_NotSupported):
            # Answers from the device itself, unlike its name.
            nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        return _memory_errors(nvml, device)
    except nvml.NVMLError as error:
        return f"does not answer ({error})"


def _is_visible(nvml: Any, device: Any, index: int, visible: str | None) -> bool:
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if str(index) in names:
        return True
    if all(name.isdigit() for name in names):
        return False
    uuid = str(nvml.nvmlDeviceGetUUID(device))
    # Parts of a GPU have names of their own: what can't be told apart counts.
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


# ---- How many accelerators of a kind this host's workers can use.


_INTEL = "0x8086"


def count_gpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """GPUs that CUDA or ROCm programs would see, as `torch.cuda.device_count()` has it.

    Args:
        environment: Of the workers; CUDA_VISIBLE_DEVICES (or HIP_VISIBLE_DEVICES, where AMD's driver is) may hide some.
        root: Where /dev and /sys are.
    """
    installed = _count_by_nvml() if root == Path("/") else None
    if installed is None:
        installed = sum(1 for path in root.glob("dev/nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if installed:
        return _visible(environment.get("CUDA_VISIBLE_DEVICES"), installed)
    hidden_by = environment.get("HIP_VISIBLE_DEVICES", environment.get("CUDA_VISIBLE_DEVICES"))
    return _visible(hidden_by, _count_amd(root))


def count_xpus(environment: Mapping[str, str], root: Path = Path("/")) -> int:
    """Intel's GPUs, as `torch.xpu.device_count()` has it where all of them are of one kind.

    Args:
        environment: Of the workers; ZE_AFFINITY_MASK may hide some.
        root: Where /sys is.
    """
    nodes = [node for node in root.glob("sys/class/drm/renderD*") if _text(node / "device/vendor") == _INTEL]
    return _visible(environment.get("ZE_AFFINITY_MASK"), len(nodes))


def _count_by_nvml() -> int | None:
    """What NVIDIA's library says; None where it, or its driver, is not there."""
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
    """Nodes of AMD's driver that can compute: processors are listed among them, with no SIMD unit."""
    properties = (_text(node / "properties") for node in root.glob("sys/class/kfd/kfd/topology/nodes/*"))
    return sum(1 for text in properties if re.search(r"^simd_count [1-9]", text, re.MULTILINE))


def _visible(text: str | None, installed: int) -> int:
    """How many of them a variable leaves, by CUDA's rules.

    What follows the first name that is none is hidden; a name that is there twice hides all; and of the slices of GPUs
    (MIG) a process sees the first only.
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


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
