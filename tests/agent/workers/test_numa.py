"""Each worker may run near its GPU, or on the node of its rank, and on no other processors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent.host_shapes import build_host, core_complexes, two_sockets_of_two_nodes
from rallypoint.agent.spawner.protocol import ranges
from rallypoint.agent.workers.affinity import BINDINGS, NumaError, Topology, bind, read_topology

EVERYWHERE = range(1024)


def bound(
    binding: str, topology: Topology, workers: int, allowed: range | set[int] = EVERYWHERE
) -> list[str]:
    return [ranges(cpus) for cpus in bind(binding, topology, allowed, workers)]


def test_without_gpus_workers_are_spread_over_the_nodes_in_order(tmp_path: Path) -> None:
    """Neighbouring ranks share a node; with fewer workers than nodes each has a node of its own."""
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path))
    assert bound("node", host, 8) == [
        *["0-3,16-19"] * 2,
        *["4-7,20-23"] * 2,
        *["8-11,24-27"] * 2,
        *["12-15,28-31"] * 2,
    ]
    assert bound("node", host, 2) == ["0-3,16-19", "8-11,24-27"]
    assert bound("node", host, 1) == ["0-3,16-19"]


def test_a_worker_is_where_its_gpu_is(tmp_path: Path) -> None:
    """The GPU whose index is the local rank decides; workers after the last GPU start again with the first."""
    gpus = [("0000:01:00.0", 3), ("0000:02:00.0", 3), ("0000:03:00.0", 0)]
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path, gpus))
    assert bound("node", host, 4) == ["12-15,28-31", "12-15,28-31", "0-3,16-19", "12-15,28-31"]
    assert bound("socket", host, 3) == ["8-15,24-31", "8-15,24-31", "0-7,16-23"]


def test_a_socket_is_all_its_nodes(tmp_path: Path) -> None:
    """If a socket has one node, both bindings are the same."""
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path / "intel"))
    assert bound("socket", host, 2) == ["0-7,16-23", "8-15,24-31"]
    amd = read_topology({}, core_complexes(tmp_path / "amd"))
    assert bound("socket", amd, 2) == bound("node", amd, 2) == ["0-7", "8-15"]


def test_exclusive_shares_are_whole_cores_and_the_first_have_one_more(tmp_path: Path) -> None:
    """Both threads of a core go to the same worker, and no core goes to two."""
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path))
    assert bound("exclusive", host, 8)[:4] == ["0-1,16-17", "2-3,18-19", "4-5,20-21", "6-7,22-23"]
    threads = {cpu: cpu + 5 for cpu in range(5)}
    five_cores = build_host(tmp_path / "five", {0: range(10)}, sockets={0: [0]}, threads=threads)
    assert bound("exclusive", read_topology({}, five_cores), 3) == ["0-1,5-6", "2-3,7-8", "4,9"]
    with pytest.raises(NumaError, match=r"has 5 physical cores that may be used \(0-9\) and 6 workers"):
        bound("exclusive", read_topology({}, five_cores), 6)


def test_a_gpu_that_no_worker_uses_keeps_its_share(tmp_path: Path) -> None:
    """As in torchrun: another job of this host may use it."""
    gpus = [(f"0000:0{number}:00.0", 0) for number in range(4)]
    host = read_topology({}, core_complexes(tmp_path, gpus))
    assert bound("exclusive", host, 2) == ["0-1", "2-3"]


def test_each_worker_has_a_complex_of_its_own_while_there_are_enough(tmp_path: Path) -> None:
    """The fullest complexes come first; then they are shared."""
    host = read_topology({}, core_complexes(tmp_path))
    assert bound("core-complex", host, 4) == ["0-1", "2-3", "8-9", "10-11"]
    assert bound("core-complex", host, 10)[:5] == ["0-1", "2-3", "4-5", "6-7", "0-1"]
    assert bound("core-complex", host, 4, {1, 4, 5, 8, 9}) == ["4-5", "1", "8-9", "8-9"]


@pytest.mark.parametrize("binding", BINDINGS)
def test_workers_get_only_processors_that_the_agent_may_use(tmp_path: Path, binding: str) -> None:
    """A container's cpuset limits all bindings; a node outside it gets no worker."""
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path))
    allowed = {1, 2, 17, 18, 9}
    for cpus in bind(binding, host, allowed, 3):
        assert cpus
        assert cpus <= allowed
    with pytest.raises(NumaError, match="no NUMA node"):
        bind(binding, host, {999}, 1)


def test_a_gpu_beyond_the_cpuset_is_named(tmp_path: Path) -> None:
    """Without this error a worker could run on no processor."""
    host = read_topology({}, two_sockets_of_two_nodes(tmp_path, [("0000:01:00.0", 0), ("0000:02:00.0", 2)]))
    with pytest.raises(NumaError, match=r"worker 1 belongs to NUMA node 2, .*\(allowed are 0-7\); widen"):
        bind("node", host, range(8), 2)
    for binding in BINDINGS:
        assert bind(binding, host, range(8), 1)[0] <= set(range(8)), (
            "another worker's GPU is no matter of this one"
        )


def test_this_host_can_be_bound() -> None:
    """The topology of the real kernel is usable, on any machine."""
    allowed = os.sched_getaffinity(0)
    topology = read_topology({"CUDA_VISIBLE_DEVICES": ""})
    for binding in ("node", "socket", "core-complex"):
        for cpus in bind(binding, topology, allowed, 3):
            assert cpus
            assert cpus <= allowed
