"""Where runs are: what the servicers ask for whoever answers for a run."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


class RunLocator(Protocol):
    """Knows which runs are here, and who else answers for the others."""

    def shard(self, run_id: str) -> Shard:
        """The shard of a run, if this process owns it: for whatever waits or streams.

        Raises:
            NotOwner: It is owned elsewhere, or by nobody at the moment.
        """

    def writer(self, run_id: str) -> Shard:
        """The shard of a run, for what writes; as `shard`, but refused where a write would wait for an operator.

        Raises:
            NotOwner: As of `shard`.
            EtcdFull: Its journal takes nothing at the moment.
        """

    async def reader(self, run_id: str) -> RunReader:
        """Who answers reads of a run here: its shard, or what is durable of it.

        Raises:
            NotOwner: It can't be read here at the moment.
        """

    async def readers(self) -> Sequence[RunReader]:
        """Those of all runs that there are; no run is in two of them.

        Raises:
            NotOwner: Some can't be read here at the moment.
        """

    def shards(self) -> Sequence[Shard]:
        """All shards that this process has, those included whose streams are still open: what a drain must end."""


class SingleShardLocator:
    """The home of runs that are all here, for as long as the process lives."""

    def __init__(self, shard: Shard) -> None:
        """All runs are in `shard`."""
        self._shard = shard

    def shard(self, run_id: str) -> Shard:
        """The one."""
        return self._shard

    def writer(self, run_id: str) -> Shard:
        """The one."""
        return self._shard

    async def reader(self, run_id: str) -> RunReader:
        """The one."""
        return self._shard

    async def readers(self) -> Sequence[RunReader]:
        """The one."""
        return [self._shard]

    def shards(self) -> Sequence[Shard]:
        """The one."""
        return [self._shard]


# ---- ListReplicas where there is one: a service whose journal is its own.


ListReplicas: TypeAlias = Callable[[str], pb.ListReplicasResponse]
"""Answers ListReplicas for a run_id, "" for none."""


class OnlyReplica:
    """The only replica: it owns the one shard that there is."""

    def __init__(self, journal: str = "memory", since: float | None = None, instance: str = "") -> None:
        """Describe it: the kind of its journal, unix seconds, and what was drawn for the process."""
        self._address = ""
        self._journal = journal
        self._since = since
        self._instance = instance

    def listen(self, address: str) -> None:
        """Note where it listens."""
        self._address = address

    def __call__(self, run_id: str) -> pb.ListReplicasResponse:
        """The answer."""
        name = socket.gethostname()
        replica = pb.Replica(name=name, address=self._address, instance=self._instance, shards=1)
        if self._since is not None:
            replica.since.FromNanoseconds(round(self._since * 1e9))
        response = pb.ListReplicasResponse(
            replicas=[replica], answered_by=name, journal=self._journal, shards=1
        )
        if run_id:
            response.run.MergeFrom(pb.RunPlace(owner=name, address=self._address))
            response.run.SetInParent()
        return response
