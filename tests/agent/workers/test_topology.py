"""The topology of a host is read from the kernel's files, also if there are few."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.host_shapes import build_host, core_complexes, two_sockets_of_two_nodes
from rallypoint.agent.spawner.protocol import parse_ranges, ranges
from rallypoint.agent.workers.affinity import NumaError, read_topology

GPUS = [("0000:1b:00.0", 1), ("0000:0a:00.0", 0), ("0000:c1:00.0", -1)]


def test_a_host_is_read(tmp_path: Path) -> None:
    """It has nodes, sockets, threads of a core, and the largest data cache."""
    topology = read_topology({}, two_sockets_of_two_nodes(tmp_path))
    assert topology.nodes[1] == {4, 5, 6, 7, 20, 21, 22, 23}
    assert (topology.packages[7], topology.packages[8]) == (0, 1)
    assert topology.cores[5] == topology.cores[21] == {5, 21}
    assert topology.complexes[0] == topology.nodes[0] | topology.nodes[1]
    assert list(topology.gpus) == []
    assert read_topology({}, core_complexes(tmp_path / "amd")).complexes[9] == {8, 9}


def test_a_host_that_shows_little_is_one_node(tmp_path: Path) -> None:
    """In a kernel without NUMA, or a virtual machine without caches, all processors are near one another."""
    (tmp_path / "sys/devices/system/cpu").mkdir(parents=True)
    (tmp_path / "sys/devices/system/cpu/online").write_text("0-3\n")
    topology = read_topology({}, tmp_path)
    assert topology.nodes == {0: {0, 1, 2, 3}}
    assert topology.cores[2] == {2}
    assert topology.complexes[2] == {0, 1, 2, 3}
    assert topology.packages[2] == 0


@pytest.mark.parametrize(
    ("visible", "nodes"),
    [
        (None, [0, 1, 0]),
        ("2,1", [0, 1]),
        ("GPU-0000:1b", [1]),
        ("1, GPU-0000:c1:00.0", [1, 0]),
        ("", []),
        ("-1", []),
    ],
)
def test_gpus_are_counted_as_workers_see_them(tmp_path: Path, visible: str | None, nodes: list[int]) -> None:
    """The sequence is that of PCI addresses, or of CUDA_VISIBLE_DEVICES; a node of -1 means the only node."""
    build_host(tmp_path, {0: [0], 1: [1]}, sockets={0: [0, 1]}, gpus=GPUS)
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert list(read_topology(environment, tmp_path).gpus) == nodes


@pytest.mark.parametrize("name", ["3", "GPU-ffff", "MIG-1"])
def test_a_gpu_that_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    """A worker must not be bound as if its GPU were another."""
    build_host(tmp_path, {0: [0], 1: [1]}, sockets={0: [0, 1]}, gpus=GPUS)
    with pytest.raises(NumaError, match=f"CUDA_VISIBLE_DEVICES names '{name}', which is none of the 3 GPUs"):
        read_topology({"CUDA_VISIBLE_DEVICES": f"0,{name}"}, tmp_path)


@pytest.mark.parametrize(("text", "numbers"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("", set()), ("5", {5})])
def test_lists_are_the_kernels(text: str, numbers: set[int]) -> None:
    """They are parsed and written in the kernel's format."""
    assert parse_ranges(text) == numbers
    assert ranges(numbers) == text.strip()
