"""How many accelerators of a kind this host's workers can use."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rallypoint.agent.nvml import GpuLibraryError, NoDriverError, driver, gpu_library

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
