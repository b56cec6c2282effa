"""Build folders that describe hosts as the kernel does under /sys and /proc."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def build_host(
    root: Path,
    nodes: Mapping[int, Sequence[int]],
    *,
    sockets: Mapping[int, Sequence[int]],
    threads: Mapping[int, int] | None = None,
    caches: Sequence[Sequence[int]] = (),
    gpus: Sequence[tuple[str, int]] = (),
) -> Path:
    """Write the files of one host.

    Args:
        root: the folder for the files.
        nodes: the processors of each NUMA node.
        sockets: the NUMA nodes of each socket.
        threads: the second thread of a core, by its first; None: each core has one thread.
        caches: the processors that share each level 3 cache; empty: the host shows no caches.
        gpus: PCI address and NUMA node of each GPU; its UUID is GPU- and the address.
    """
    system = root / "sys/devices/system"
    siblings = {cpu: sorted(pair) for pair in (threads or {}).items() for cpu in pair}
    everybody = sorted(cpu for cpus in nodes.values() for cpu in cpus)
    _write(system / "cpu/online", _listed(everybody))
    for node, cpus in nodes.items():
        _write(system / f"node/node{node}/cpulist", _listed(cpus))
        socket = next(number for number, inside in sockets.items() if node in inside)
        for cpu in cpus:
            folder = system / f"cpu/cpu{cpu}"
            _write(folder / "topology/physical_package_id", str(socket))
            _write(folder / "topology/thread_siblings_list", _listed(siblings.get(cpu, [cpu])))
    for sharers in caches:
        for cpu in sharers:
            for index, (level, kind, sharing) in enumerate(
                [(1, "Data", [cpu]), (3, "Unified", sharers), (4, "Instruction", everybody)]
            ):
                folder = system / f"cpu/cpu{cpu}/cache/index{index}"
                _write(folder / "level", str(level))
                _write(folder / "type", kind)
                _write(folder / "shared_cpu_list", _listed(sharing))
    for address, node in gpus:
        _write(
            root / f"proc/driver/nvidia/gpus/{address}/information", f"Model: X\nGPU UUID: \t GPU-{address}\n"
        )
        _write(root / f"sys/bus/pci/devices/{address}/numa_node", str(node))
    return root


def two_sockets_of_two_nodes(root: Path, gpus: Sequence[tuple[str, int]] = ()) -> Path:
    """An Intel host with sub-NUMA clustering: 4 nodes of 4 cores of 2 threads, numbered as Linux does."""
    nodes = {
        node: [*range(4 * node, 4 * node + 4), *range(16 + 4 * node, 20 + 4 * node)] for node in range(4)
    }
    threads = {cpu: cpu + 16 for cpu in range(16)}
    caches = [[*nodes[0], *nodes[1]], [*nodes[2], *nodes[3]]]
    return build_host(root, nodes, sockets={0: [0, 1], 1: [2, 3]}, threads=threads, caches=caches, gpus=gpus)


def core_complexes(root: Path, gpus: Sequence[tuple[str, int]] = ()) -> Path:
    """An AMD host with one node per socket: 2 nodes of 4 complexes of 2 cores each, without SMT."""
    nodes = {0: range(8), 1: range(8, 16)}
    caches = [[first, first + 1] for first in range(0, 16, 2)]
    return build_host(root, nodes, sockets={0: [0], 1: [1]}, caches=caches, gpus=gpus)


def _listed(cpus: Sequence[int]) -> str:
    return ",".join(map(str, cpus)) + "\n"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
