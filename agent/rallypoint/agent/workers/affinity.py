"""On which processors each worker of a host may run: near the GPU it uses, or spread over the host.

The bindings are those of torchrun's `--numa-binding`, with its meaning: a worker belongs to the NUMA node of the GPU
whose index is its local rank. On a host without GPUs, where torchrun can't bind at all, the workers are spread over
the nodes in order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from rallypoint.agent.spawner.protocol import ranges

Binding: TypeAlias = Literal["node", "socket", "exclusive", "core-complex"]
BINDINGS: tuple[Binding, ...] = get_args(Binding)

Cpus: TypeAlias = frozenset[int]


class NumaError(Exception):
    """Workers can't be bound as was asked; one line."""


@dataclass(frozen=True, slots=True)
class Topology:
    """What of a host decides where workers belong. Processors are the logical ones, by the kernel's numbers.

    Attributes:
        nodes: processors of each NUMA node.
        packages: the socket that a processor is in.
        cores: the processors that share a physical core with one, itself included.
        complexes: the processors that share its largest cache with one, itself included.
        gpus: the NUMA node of each GPU that workers see, by index.
    """

    nodes: Mapping[int, Cpus]
    packages: Mapping[int, int]
    cores: Mapping[int, Cpus]
    complexes: Mapping[int, Cpus]
    gpus: Sequence[int] = ()


def bind(binding: str, topology: Topology, allowed: Iterable[int], workers: int) -> list[Cpus]:
    """Decides where each worker may run.

    With `node`, on all processors of its NUMA node; `socket`, on all of that node's socket; `exclusive`, on physical
    cores of its node that no other worker has (the first ones have one more where they don't come out even);
    `core-complex`, on those of its node that share one largest cache, another one for each worker while there are
    enough.

    Args:
        binding: which.
        topology: of this host.
        allowed: the processors that this process may use; a worker never gets another.
        workers: how many there are on this host.

    Returns:
        The processors of each worker, by local rank.

    Raises:
        NumaError: there is none for a worker.
    """
    usable = {node: cpus & frozenset(allowed) for node, cpus in sorted(topology.nodes.items())}
    seats = _assign_numa_nodes(topology, usable, workers)
    for seat, node in enumerate(seats[:workers]):
        if not usable.get(node):
            raise NumaError(
                f"worker {seat} belongs to NUMA node {node}, where its GPU is, and may use none of its processors "
                f"(allowed are {ranges(allowed)}); widen the cpuset, or leave --numa-binding out"
            )
    if binding == "node":
        return [usable[node] for node in seats[:workers]]
    if binding == "socket":
        return [_socket(topology, usable, node) for node in seats[:workers]]
    neighbours: dict[int, list[int]] = defaultdict(list)
    for seat, node in enumerate(seats):
        neighbours[node].append(seat)
    shares: dict[int, Cpus] = {}
    for node in set(seats[:workers]):
        sitting = neighbours[node]
        share = _exclusive if binding == "exclusive" else _core_complex
        shares.update(zip(sitting, share(topology, usable[node], node, len(sitting)), strict=True))
    return [shares[local_rank] for local_rank in range(workers)]


def _assign_numa_nodes(topology: Topology, usable: Mapping[int, Cpus], workers: int) -> list[int]:
    """The NUMA node of each worker, and of each GPU that no worker here uses: its share is left free for others."""
    if topology.gpus:
        count = max(workers, len(topology.gpus))
        return [topology.gpus[seat % len(topology.gpus)] for seat in range(count)]
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
            f"({ranges(cpus)}) and {sharers} workers; they can't have one each: take --numa-binding node, or fewer "
            "workers"
        )
    shares = []
    for place in range(sharers):
        start = place * each + min(place, more)
        shares.append(frozenset().union(*cores[start : start + each + (place < more)]))
    return shares


def _core_complex(topology: Topology, cpus: Cpus, _node: int, sharers: int) -> list[Cpus]:
    groups = _grouped(cpus, topology.complexes)
    # Those of which most may be used come first.
    complexes = [groups[first] for first in sorted(groups, key=lambda first: (-len(groups[first]), first))]
    return [complexes[place % len(complexes)] for place in range(sharers)]


def _grouped(cpus: Cpus, partners: Mapping[int, Cpus]) -> dict[int, Cpus]:
    """The processors by the lowest-numbered of their partners, which may itself not be among them."""
    groups: dict[int, set[int]] = defaultdict(set)
    for cpu in cpus:
        groups[min(partners[cpu])].add(cpu)
    return {first: frozenset(group) for first, group in groups.items()}


# ---- Reads from the kernel how this host is built: NUMA nodes, sockets, cores, caches, and where its GPUs are.


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
