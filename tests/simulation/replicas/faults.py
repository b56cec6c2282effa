"""The faults of replicas and their etcd; those of nodes and operators are in `simulation.faults`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simulation import faults
from simulation.cluster import Cluster
from simulation.network import Link
from simulation.replicas.cluster import REPLICAS, ReplicaCluster
from simulation.replicas.etcd_model import MEMBERS

_SERVER = ("crash_server", "lose_server_host", "pause_server", "drain_server", "change_disk")

ACTIONS: dict[str, tuple[faults.Action, float, bool]] = {
    name: each for name, each in faults.ACTIONS.items() if name not in _SERVER
}


def _action(
    weight: float, *, of_server: bool = True
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(act: Callable[[Any], None]) -> Callable[[Any], None]:
        ACTIONS[act.__name__] = act, weight, of_server
        return act

    return register


def _some_replica(cluster: ReplicaCluster) -> int:
    """Return the index of a replica, mostly of one that owns the run."""
    owners = cluster.owners
    if owners and cluster.chance.random() < 0.7:
        return owners[0]
    return cluster.chance.randrange(REPLICAS)


def _cut(cluster: Cluster, links: list[Link], seconds: float) -> None:
    up, down = cluster.chance.choice([(True, True), (True, True), (True, False), (False, True)])
    for link in links:
        cluster.network.block(link, up=up, down=down)
        cluster.clockwork.after(seconds, cluster.heal, link)


@_action(2.0)
def kill_replica(cluster: ReplicaCluster) -> None:
    """A replica is killed, or its host loses power."""
    cluster.end_replica(_some_replica(cluster), silently=cluster.chance.random() < 0.3)


@_action(2.0)
def pause_replica(cluster: ReplicaCluster) -> None:
    """A replica is paused, and continues."""
    replica = cluster.replicas[_some_replica(cluster)]
    if replica is not None:
        cluster.pause(replica.process, cluster.chance.choice([0.5, 3.0, 6.0, 12.0, 25.0]))


@_action(1.0)
def drain_replica(cluster: ReplicaCluster) -> None:
    """A replica is drained."""
    replica = cluster.replicas[_some_replica(cluster)]
    if replica is not None:
        cluster.note("drain", replica.process.name)
        replica.drain()


@_action(1.5)
def cut_replica_from_etcd(cluster: ReplicaCluster) -> None:
    """A replica does not reach etcd, or only some of its members."""
    name = f"replica{_some_replica(cluster)}"
    links = [link for (host, _), link in cluster.pairs.items() if host == name]
    if cluster.chance.random() < 0.4:
        links = [link for link in links if cluster.chance.random() < 0.6]
    cluster.note("cut from etcd", name, len(links))
    _cut(cluster, links, cluster.chance.choice([1.0, 5.0, 15.0, 30.0]))


@_action(1.0, of_server=False)
def cut_replica_from_clients(cluster: ReplicaCluster) -> None:
    """Clients and nodes do not reach a replica, which reaches etcd."""
    index = _some_replica(cluster)
    replica = cluster.replicas[index]
    if replica is not None:
        links = [link for (_, target), link in cluster.pairs.items() if target == replica.address]
        cluster.note("cut from clients", replica.process.name, len(links))
        _cut(cluster, links, cluster.chance.choice([1.0, 5.0, 20.0]))


@_action(1.0)
def kill_member(cluster: ReplicaCluster) -> None:
    """A member of etcd is killed."""
    cluster.end_member(cluster.chance.randrange(MEMBERS), silently=cluster.chance.random() < 0.3)


@_action(1.0)
def pause_member(cluster: ReplicaCluster) -> None:
    """A member of etcd is paused, mostly the leader."""
    etcd = cluster.etcd
    assert etcd is not None
    index = etcd.leader if cluster.chance.random() < 0.6 else cluster.chance.randrange(MEMBERS)
    member = etcd.members[index]
    if member is None:
        return
    seconds = cluster.chance.choice([0.5, 3.0, 10.0])
    cluster.pause(member.process, seconds)
    etcd.changed()
    cluster.clockwork.after(seconds, etcd.woke, index)


@_action(1.5)
def part_members(cluster: ReplicaCluster) -> None:
    """Some members of etcd do not reach each other: one is isolated, or two are and the third reaches both."""
    etcd, chance = cluster.etcd, cluster.chance
    assert etcd is not None
    one = etcd.leader if chance.random() < 0.6 else chance.randrange(MEMBERS)
    others = [each for each in range(MEMBERS) if each != one]
    if chance.random() < 0.4:
        others = others[:1]
    cut = [frozenset((one, each)) for each in others]
    cluster.note("members parted", one, others)
    etcd.cut.update(cut)
    etcd.changed()
    cluster.clockwork.after(chance.choice([0.5, 3.0, 10.0, 20.0]), etcd.cut.difference_update, cut)


@_action(1.0)
def slow_etcd(cluster: ReplicaCluster) -> None:
    """etcd becomes slow, or fast again, or very slow now and then."""
    etcd, chance = cluster.etcd, cluster.chance
    assert etcd is not None
    etcd.latency = chance.choice([0.0005, 0.005, 0.05, 0.3])
    etcd.straggling = chance.choice([0.0, 0.0, 0.05, 0.2])
    cluster.note("etcd latency", etcd.latency, etcd.straggling)


@_action(1.0)
def compact_etcd(cluster: ReplicaCluster) -> None:
    """etcd compacts its history."""
    etcd = cluster.etcd
    assert etcd is not None
    etcd.store.compact(max(0, etcd.store.revision - cluster.chance.choice([0, 0, 3, 20])))
    cluster.note("compacted", etcd.store.compacted)


@_action(0.5)
def fill_etcd(cluster: ReplicaCluster) -> None:
    """etcd refuses writes because its quota is used up, or accepts them again."""
    etcd = cluster.etcd
    assert etcd is not None
    etcd.store.full = not etcd.store.full
    cluster.note("full", etcd.store.full)
