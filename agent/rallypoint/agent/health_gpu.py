"""Checks a host's GPUs through NVML: that none is lost, or has memory that can't be relied on."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from rallypoint.agent.nvml import NoDriverError, driver


def look_at_gpus(nvml: Any, visible: str | None) -> str | None:
    """Why the GPUs are not healthy; None if they are.

    Args:
        nvml: The library.
        visible: CUDA_VISIBLE_DEVICES; None: all count.
    """
    try:
        with driver(nvml):
            for index in range(nvml.nvmlDeviceGetCount()):
                if (why := _look_at(nvml, index, visible)) is not None:
                    return f"GPU {index} {why}"
    except NoDriverError as error:
        return f"no driver answers ({error})"
    except nvml.NVMLError as error:
        return f"the driver does not say how many there are ({error})"
    return None


def _look_at(nvml: Any, index: int, visible: str | None) -> str | None:
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
