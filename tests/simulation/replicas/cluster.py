"""Three replicas over three members of etcd, with the nodes, clients, onlookers and operator of a cluster."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from rallypoint.etcd import cluster as etcd_connection
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.cluster import service
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.ownership import MoveSettings, shard_of
from rallypoint.rendezvous.cluster.replica import Replica, Replicas
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rendezvous.journal.journal import Checkpoint, Entry, Forgotten, Record
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc import replica_client
from rallypoint.rpc.endpoint import Endpoint, Plaintext
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.replica_client import ReplicaClient
from simulation.clockwork import Process
from simulation.cluster import Cluster
from simulation.network import Link, Listener
from simulation.plan import RUN, Plan
from simulation.replicas.etcd_model import MEMBERS, EtcdModel, Member
from simulation.replicas.replica import ReplicaServer
from simulation.replicas.tap import Tap, tapped
from simulation.wire import Channel

REPLICAS = 3
_MEMBER_ADDRESSES = [f"10.1.0.{index + 1}:2379" for index in range(MEMBERS)]
_REPLICA_ADDRESSES = [f"10.0.0.{index + 1}:29400" for index in range(REPLICAS)]
_PREFIX = "/rallypoint"


class ReplicaCluster(Cluster):
    """All parts of one seed's simulation."""

    def __init__(self, plan: Plan) -> None:
        self.etcd: EtcdModel | None = None
        self.replicas: list[ReplicaServer | None] = [None] * REPLICAS
        self.starting: set[int] = set()
        # Links of pairs of hosts, by their names.
        self.pairs: dict[tuple[str, str], Link] = {}
        self.hosts: dict[Process, str] = {}
        self.etcd_address = EtcdAddress(
            tuple(Endpoint(*_parted(each)) for each in _MEMBER_ADDRESSES), prefix=_PREFIX
        )
        draw = random.Random(f"{plan.seed}/replicas")
        self.shards = draw.choice([1, 1, 2])
        self.wanted = Replicas(
            lease_ttl=draw.choice([3.0, 6.0, 10.0]),
            shards=self.shards,
            moves=MoveSettings(settle=draw.choice([2.0, 10.0]), claim_interval=1.0, declined=5.0),
        )
        super().__init__(plan)

    # ---- addresses and links

    def dial(self, process: Process, target: str) -> Channel:
        """Return a channel of a process to an address."""
        return Channel(process, self.pair(self._host(process), target), self.network, target)

    def _host(self, process: Process) -> str:
        return self.hosts.get(process, process.name.partition("#")[0].partition(".")[0])

    def pair(self, host: str, target: str) -> Link:
        """Return the link between a host and an address."""
        link = self.pairs.get((host, target))
        if link is None:
            link = self.pairs[host, target] = self.new_link(f"{host}>{target}")
        return link

    def to_service(self, process: Process, _: Link) -> Any:
        """See `Cluster`: a client that knows the addresses of all replicas."""
        chance = self._stream(f"route/{process.name}")
        pace = Pace(process.time, asyncio.sleep, chance.random)
        return ReplicaClient(",".join(_REPLICA_ADDRESSES), Plaintext(), pace=pace)

    def links_to_service(self, process: Process, _: Link) -> list[Link]:
        """See `Cluster`: the links of its host to each replica."""
        return [self.pair(self._host(process), target) for target in _REPLICA_ADDRESSES]

    # ---- etcd and the replicas

    def start_server(self) -> None:
        """Start the missing members of etcd and the missing replicas."""
        if self.etcd is None:
            self.referee.ledger(RUN).inexact = 1.0
            self.referee.ledger(RUN).clock_jumps = math.inf
            shard = shard_of(RUN, self.shards)
            self.tap = Tap(
                Keys(_PREFIX),
                lambda: self.clockwork.now,
                self._committed,
                lambda owned: self._owned() if owned == shard else None,
                self.referee.blame,
            )
            self.etcd = EtcdModel(self.clockwork, self._stream("etcd"), self.note, self.tap.committed)
        for index in range(MEMBERS):
            self.start_member(index)
        for index in range(REPLICAS):
            self.start_replica(index)

    def _owned(self) -> None:
        self.referee.ledger(RUN).server_started(self.clockwork.now)

    def _committed(self, entries: Sequence[Entry], given_at: float) -> None:
        for entry in entries:
            match entry:
                case Record():
                    self.referee.durable(entry, given_at)
                    self._spring(entry)
                case Forgotten():
                    self.referee.forgotten(entry)
                case Checkpoint():
                    ledger = self.referee.ledger(entry.run_id)
                    if ledger.revision == 0 or ledger.forgotten:  # the run begins with this checkpoint
                        self.referee.forgotten(Forgotten(entry.run_id, entry.revision, entry.content))
                case StoreChange():
                    self.referee.store.durable(entry)

    def start_member(self, index: int) -> None:
        """Start a member of etcd, unless it runs."""
        assert self.etcd is not None
        if self.etcd.members[index] is None:
            member = Member(self.etcd, index, self.new_process(f"etcd{index}"))
            self.etcd.members[index] = member
            self.network.listeners[_MEMBER_ADDRESSES[index]] = member

    def end_member(self, index: int, *, silently: bool) -> None:
        """Kill a member of etcd; it starts again soon."""
        assert self.etcd is not None
        member = self.etcd.members[index]
        if member is None:
            return
        self.note("end", f"etcd{index}")
        member.process.kill()
        self.etcd.members[index] = None
        self.etcd.changed()
        self.network.listeners.pop(_MEMBER_ADDRESSES[index], None)
        self.network.died(member.process, silently=silently)
        self.clockwork.after(self.chance.choice([0.3, 3.0, 10.0]), self.start_member, index)

    def start_replica(self, index: int) -> None:
        """Start a replica, unless it runs."""
        if self.replicas[index] is not None:
            return
        name = f"replica{index}"
        self._lives += 1
        process = self.new_process(f"{name}#{self._lives}")
        self.note("start", process.name)
        self.hosts[process] = name
        self.replicas[index] = ReplicaServer(
            process,
            self.clockwork,
            self.referee,
            name=name,
            address=_REPLICA_ADDRESSES[index],
            etcd=self.etcd_address,
            wanted=self.wanted,
            limits=self.plan.limits,
            wall_offset=self._wall_offset + self._skew.uniform(-1.0, 1.0),
            chance=self._stream(process.name),
            on_ready=partial(self._replica_serves, index),
            on_exit=lambda server: self.end_replica(index, server, silently=False),
        )

    def _replica_serves(self, index: int, server: ReplicaServer) -> None:
        self.network.listeners[_REPLICA_ADDRESSES[index]] = server

    def end_replica(self, index: int, server: ReplicaServer | None = None, *, silently: bool) -> None:
        """End the process of a replica, and start the next one soon."""
        present = self.replicas[index]
        if present is None or (server is not None and present is not server):
            return
        self.replicas[index] = None
        self.note("end", present.process.name)
        present.process.kill()
        self.network.listeners.pop(present.address, None)
        self.network.died(present.process, silently=silently)
        self.clockwork.after(self.chance.choice([0.05, 0.5, 3.0, 8.0]), self.start_replica, index)

    @property
    def served(self) -> dict[int, Shard]:
        """The run's shard at each replica that believes it serves it."""
        number = shard_of(RUN, self.shards)
        return {
            index: each.services.replica.shard_manager.serving[number]
            for index, each in enumerate(self.replicas)
            if each is not None
            and each.services is not None
            and each.services.replica.shard_manager is not None
            and number in each.services.replica.shard_manager.serving
        }

    @property
    def owners(self) -> list[int]:
        """The replicas of `served`."""
        return [*self.served]

    @property
    def serving(self) -> Process | None:
        """See `Cluster`: the process of the first replica that believes it owns the run."""
        owner = next((self.replicas[index] for index in self.owners), None)
        return None if owner is None else owner.process

    def _writable_round(self, run_id: str) -> int | None:
        # The round of the owner in etcd. Another replica may still have the last round: one that hands the shard over
        # accepts no write (seed 120638951), and writes to one that was paused fail (seed 120646021).
        assert self.etcd is not None
        pair = self.etcd.store.pairs.get(Keys(_PREFIX).owner(shard_of(RUN, self.shards)))
        instance = "" if pair is None else Owner.decode(pair.value).instance
        for index, shard in self.served.items():
            replica = self.replicas[index]
            assert replica is not None
            assert replica.services is not None
            if replica.services.replica.me.instance == instance and not replica.process.paused:
                return shard.engine.writable_round(run_id)
        return None

    def calm_down(self) -> None:
        assert self.etcd is not None
        self.etcd.cut.clear()
        self.etcd.latency, self.etcd.straggling, self.etcd.store.full = 0.002, 0.0, False
        super().calm_down()

    def settled(self) -> bool:
        self.server = self if self.owners else None  # type: ignore[assignment]
        return super().settled()

    def dispose(self) -> None:
        """See `Cluster`. The tasks of a replica wait when they are cancelled, so they are run to their end."""
        self.clockwork.unwind(self.processes)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the product's clients open simulated channels, and its leases use simulated clocks."""
        with pytest.MonkeyPatch.context() as patch:
            tapped(patch, self.tap)
            patch.setattr(
                etcd_connection.EtcdChannel,
                "_open",
                lambda own: self.dial(_process(), _address(own._endpoint)),
            )
            patch.setattr(
                replica_client, "channel_at", lambda endpoint, *_: self.dial(_process(), _address(endpoint))
            )
            patch.setattr(service, "Replica", partial(Replica, lease_clock=lambda: _process().boot_time()))
            yield


def _process() -> Process:
    loop: Any = asyncio.get_running_loop()
    assert isinstance(loop, Process)
    return loop


def _address(endpoint: Endpoint) -> str:
    return f"{endpoint.host}:{endpoint.port}"


def _parted(address: str) -> tuple[str, int]:
    host, _, port = address.partition(":")
    return host, int(port)


def random_listener(cluster: ReplicaCluster) -> Callable[[str], Listener | None]:
    """Return a lookup of listeners: clients without an address get a random replica that takes connections."""

    def listening(target: str) -> Listener | None:
        listeners = cluster.network.listeners
        if target:
            return listeners.get(target)
        there = [listeners[each] for each in _REPLICA_ADDRESSES if each in listeners]
        return cluster.network.random.choice(there) if there else None

    return listening
