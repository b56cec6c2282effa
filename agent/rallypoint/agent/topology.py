"""Reads from the kernel how this host is built: NUMA nodes, sockets, cores, caches, and where its GPUs are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rallypoint.agent.numa import Cpus, NumaError, Topology

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def read_topology(environment: Mapping[str, str], root: Path = Path("/")) -> Topology:
    """Reads it.

    GPUs are NVIDIA's, as their driver lists them under /proc: the order of their PCI addresses, which is CUDA's on
    hosts whose GPUs are of one kind, and elsewhere with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        environment: of the workers; CUDA_VISIBLE_DEVICES says which GPUs they see, and in what order.
        root: where /sys and /proc are.

    Raises:
        NumaError: CUDA_VISIBLE_DEVICES names a GPU that this host doesn't have.
    """
    system = root / "sys/devices/system"
    online = parse_ranges(_text(system / "cpu/online"))
    nodes = {
        int(folder.name.removeprefix("node")): parse_ranges(_text(folder / "cpulist"))
        for folder in system.glob("node/node[0-9]*")
    }
    if not any(nodes.values()):  # a kernel without NUMA
        nodes = {0: online}
    cpus = online.union(*nodes.values())
    folders = {cpu: system / f"cpu/cpu{cpu}" for cpu in cpus}
    alone = {cpu: frozenset({cpu}) for cpu in cpus}
    node_of = {cpu: processors for processors in nodes.values() for cpu in processors}
    return Topology(
        nodes=nodes,
        packages={cpu: _number(folders[cpu] / "topology/physical_package_id") for cpu in cpus},
        cores={
            cpu: parse_ranges(_text(folders[cpu] / "topology/thread_siblings_list")) or alone[cpu]
            for cpu in cpus
        },
        # Virtual machines often show no caches.
        complexes={cpu: _sharing_largest_cache(folders[cpu]) or node_of.get(cpu, alone[cpu]) for cpu in cpus},
        gpus=_gpu_nodes(environment.get(VISIBLE_GPUS), root),
    )


def parse_ranges(text: str) -> Cpus:
    """Reads a list as the kernel writes it: "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            low, _, high = part.partition("-")
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def _sharing_largest_cache(folder: Path) -> Cpus:
    best, sharing = -1, frozenset[int]()
    for cache in folder.glob("cache/index[0-9]*"):
        level = _number(cache / "level")
        if _text(cache / "type").strip() in ("Unified", "Data") and level > best:
            best, sharing = level, parse_ranges(_text(cache / "shared_cpu_list"))
    return sharing


def _gpu_nodes(visible: str | None, root: Path) -> list[int]:
    """The NUMA node of each GPU that workers see."""
    # The driver's listing rather than NVML: it says as much, and needs no library.
    installed = sorted(root.glob("proc/driver/nvidia/gpus/*"), key=lambda folder: folder.name.lower())
    if visible is None or not installed:
        seen = installed
    else:
        seen = [
            _find_gpu(name.strip(), installed)
            for name in visible.split(",")
            if name.strip() not in ("", "-1")
        ]
    # -1 is what a host with one node says.
    return [max(0, _number(root / f"sys/bus/pci/devices/{gpu.name.lower()}/numa_node")) for gpu in seen]


def _find_gpu(name: str, installed: list[Path]) -> Path:
    """A GPU by its index, or by (the beginning of) its UUID."""
    if name.isdecimal() and int(name) < len(installed):
        return installed[int(name)]
    for folder in installed:
        for line in _text(folder / "information").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "GPU UUID" and not name.isdecimal() and value.strip().startswith(name):
                return folder
    raise NumaError(
        f"{VISIBLE_GPUS} names {name!r}, which is none of the {len(installed)} GPUs whose place is known; "
        "expected indices or UUIDs, or leave --numa-binding out"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int:
    try:
        return int(_text(path))
    except ValueError:
        return 0
