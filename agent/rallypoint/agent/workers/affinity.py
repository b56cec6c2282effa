"""Binds each worker of a host to processors: near the GPU that it uses, or spread over the host.

The bindings are those of torchrun's `--numa-binding`: a worker belongs to the NUMA node of the GPU whose index is its
local rank. On a host without GPUs, where torchrun can't bind, the workers are spread over the nodes in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rallypoint.agent.spawner.protocol import parse_ranges, ranges
from rallypoint.rpc.text import text_in

BINDINGS = ("node", "socket", "exclusive", "core-complex")

Cpus: TypeAlias = frozenset[int]


class NumaError(Exception):
    """Workers can't be bound as requested; one line."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The layout of a host, as far as bindings need it. Processors are logical ones, by the kernel's numbers.

    Attributes:
        nodes: processors of each NUMA node.
        packages: the socket of each processor.
        cores: for each processor, those on the same physical core, itself included.
        complexes: for each processor, those that share its largest cache, itself included.
        gpus: the NUMA node of each GPU that workers see, by index.
    """

    nodes: Mapping[int, Cpus]
    packages: Mapping[int, int]
    cores: Mapping[int, Cpus]
    complexes: Mapping[int, Cpus]
    gpus: Sequence[int] = ()


def bind(binding: str, topology: Topology, allowed: Iterable[int], workers: int) -> list[Cpus]:
    """Choose the processors of each worker.

    `node`: all processors of its NUMA node. `socket`: all of that node's socket. `exclusive`: physical cores of its
    node that no other worker has (if the cores do not divide evenly, the first workers get one more). `core-complex`:
    those of its node that share one largest cache, a different cache for each worker while there are enough.

    Args:
        binding: one of `BINDINGS`.
        allowed: the processors that this process may use; a worker never gets another.

    Returns:
        The processors of each worker, by local rank.

    Raises:
        NumaError: a worker would have no processor.
    """
    usable = {node: cpus & frozenset(allowed) for node, cpus in sorted(topology.nodes.items())}
    assigned = _assign_numa_nodes(topology, usable, workers)
    for index, node in enumerate(assigned[:workers]):
        if not usable.get(node):
            raise NumaError(
                f"worker {index} belongs to NUMA node {node}, where its GPU is, and may use none of its processors "
                f"(allowed are {ranges(allowed)}); widen the cpuset, or leave --numa-binding out"
            )
    if binding == "node":
        return [usable[node] for node in assigned[:workers]]
    if binding == "socket":
        return [_socket(topology, usable, node) for node in assigned[:workers]]
    by_node: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(assigned):
        by_node[node].append(index)
    shares: dict[int, Cpus] = {}
    for node in set(assigned[:workers]):
        sharers = by_node[node]
        share = _exclusive if binding == "exclusive" else _core_complex
        shares.update(zip(sharers, share(topology, usable[node], node, len(sharers)), strict=True))
    return [shares[local_rank] for local_rank in range(workers)]


def _assign_numa_nodes(topology: Topology, usable: Mapping[int, Cpus], workers: int) -> list[int]:
    """Return the NUMA node of each worker, then of each GPU without a worker here: its share stays free for others."""
    if topology.gpus:
        count = max(workers, len(topology.gpus))
        return [topology.gpus[index % len(topology.gpus)] for index in range(count)]
    nodes = [node for node, cpus in usable.items() if cpus]
    if not nodes:
        raise NumaError("no NUMA node of this host has a processor that this process may use")
    return [nodes[local_rank * len(nodes) // workers] for local_rank in range(workers)]


def _socket(topology: Topology, usable: Mapping[int, Cpus], node: int) -> Cpus:
    package = topology.packages[min(usable[node])]
    near = [cpus for cpus in usable.values() if cpus and topology.packages[min(cpus)] == package]
    return frozenset().union(*near)


def _exclusive(topology: Topology, cpus: Cpus, node: int, sharers: int) -> list[Cpus]:
    cores = [group for _, group in sorted(_grouped(cpus, topology.cores).items())]
    each, more = divmod(len(cores), sharers)
    if each == 0:
        raise NumaError(
            f"NUMA node {node} has {len(cores)} physical core{'s' * (len(cores) != 1)} that may be used "
            f"({ranges(cpus)}) and {sharers} workers; they can't have one each: use --numa-binding node, or fewer "
            "workers"
        )
    shares = []
    for index in range(sharers):
        start = index * each + min(index, more)
        shares.append(frozenset().union(*cores[start : start + each + (index < more)]))
    return shares


def _core_complex(topology: Topology, cpus: Cpus, _node: int, sharers: int) -> list[Cpus]:
    groups = _grouped(cpus, topology.complexes)
    # The ones with the most usable processors come first.
    complexes = [groups[first] for first in sorted(groups, key=lambda first: (-len(groups[first]), first))]
    return [complexes[index % len(complexes)] for index in range(sharers)]


def _grouped(cpus: Cpus, partners: Mapping[int, Cpus]) -> dict[int, Cpus]:
    """Group processors by the lowest number among their partners; that partner may be absent from the group."""
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[min(partners[cpu])].add(cpu)
    return {first: frozenset(group) for first, group in groups.items()}


# ---- Reads the layout of this host from the kernel: NUMA nodes, sockets, cores, caches, and the nodes of its GPUs.


VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def read_topology(environment: Mapping[str, str], root: Path = Path("/")) -> Topology:
    """Read the layout of this host.

    GPUs are those of NVIDIA, as the driver lists them under /proc, in the order of their PCI addresses. That is CUDA's
    order on hosts whose GPUs are of one kind, and on other hosts with CUDA_DEVICE_ORDER=PCI_BUS_ID.

    Args:
        environment: of the workers; CUDA_VISIBLE_DEVICES selects and orders the GPUs that they see.
        root: folder that contains /sys and /proc.

    Raises:
        NumaError: CUDA_VISIBLE_DEVICES names a GPU that this host does not have.
    """
    system = root / "sys/devices/system"
    online = parse_ranges(text_in(system / "cpu/online"))
    nodes = {
        int(folder.name.removeprefix("node")): parse_ranges(text_in(folder / "cpulist"))
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
            cpu: parse_ranges(text_in(folders[cpu] / "topology/thread_siblings_list")) or alone[cpu]
            for cpu in cpus
        },
        # Virtual machines often show no caches.
        complexes={cpu: _sharing_largest_cache(folders[cpu]) or node_of.get(cpu, alone[cpu]) for cpu in cpus},
        gpus=_gpu_nodes(environment.get(VISIBLE_GPUS), root),
    )


def _sharing_largest_cache(folder: Path) -> Cpus:
    best, sharing = -1, frozenset[int]()
    for cache in folder.glob("cache/index[0-9]*"):
        level = _number(cache / "level")
        if text_in(cache / "type") in ("Unified", "Data") and level > best:
            best, sharing = level, parse_ranges(text_in(cache / "shared_cpu_list"))
    return sharing


def _gpu_nodes(visible: str | None, root: Path) -> list[int]:
    """Return the NUMA node of each GPU that workers see."""
    # The driver's listing rather than NVML: it has the same facts, and needs no library.
    installed = sorted(root.glob("proc/driver/nvidia/gpus/*"), key=lambda folder: folder.name.lower())
    if visible is None or not installed:
        seen = installed
    else:
        seen = [
            _find_gpu(name.strip(), installed)
            for name in visible.split(",")
            if name.strip() not in ("", "-1")
        ]
    # A host with one node reports -1.
    return [max(0, _number(root / f"sys/bus/pci/devices/{gpu.name.lower()}/numa_node")) for gpu in seen]


def _find_gpu(name: str, installed: list[Path]) -> Path:
    """Find a GPU by its index, or by (the beginning of) its UUID."""
    if name.isdecimal() and int(name) < len(installed):
        return installed[int(name)]
    for folder in installed:
        for line in text_in(folder / "information").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "GPU UUID" and not name.isdecimal() and value.strip().startswith(name):
                return folder
    raise NumaError(
        f"{VISIBLE_GPUS} names {name!r}, which is none of the {len(installed)} GPUs of this host; "
        "expected indices or UUIDs, or leave --numa-binding out"
    )


def _number(path: Path) -> int:
    try:
        return int(text_in(path))
    except ValueError:
        return 0
