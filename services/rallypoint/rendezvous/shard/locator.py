"""Run locator: finds the shard or the reader of a run for the servicers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds
from rallypoint.serving.info import INSTANCE


class RunLocator(Protocol):
    """Finds the runs of this process, and the owners of the others."""

    def shard(self, run_id: str) -> Shard:
        """Return the shard of a run, if this process owns it: for calls that wait or stream.

        Raises:
            NotOwner: Another replica owns it, or none does at the moment.
        """

    def writer(self, run_id: str) -> Shard:
        """Return the shard of a run for a write; as `shard`, but refused if a write would wait for an operator.

        Raises:
            NotOwner: As of `shard`.
            EtcdFull: Its journal accepts no writes at the moment.
        """

    async def reader(self, run_id: str) -> RunReader:
        """Return a reader of a run: its shard, or a read-only copy of its durable state.

        Raises:
            NotOwner: It can't be read here at the moment.
        """

    async def readers(self) -> Sequence[RunReader]:
        """Return readers that cover all runs; no run is in two of them.

        Raises:
            NotOwner: Some can't be read here at the moment.
        """

    def shards(self) -> Sequence[Shard]:
        """Return all shards of this process, also those with streams that are still open: a drain must end them."""


class SingleShardLocator:
    """Finds all runs in the one shard of the process."""

    def __init__(self, shard: Shard) -> None:
        """All runs are in `shard`."""
        self._shard = shard

    def shard(self, run_id: str) -> Shard:
        """Return the shard."""
        return self._shard

    def writer(self, run_id: str) -> Shard:
        """Return the shard."""
        return self._shard

    async def reader(self, run_id: str) -> RunReader:
        """Return the shard."""
        return self._shard

    async def readers(self) -> Sequence[RunReader]:
        """Return the shard."""
        return [self._shard]

    def shards(self) -> Sequence[Shard]:
        """Return the shard."""
        return [self._shard]


# ---- ListReplicas of a service whose journal is its own: it has one replica.


ListReplicas: TypeAlias = Callable[[str], pb.ListReplicasResponse]
"""Returns the response of ListReplicas for a run_id, "" for none."""


class OnlyReplica:
    """The only replica: it owns the only shard."""

    def __init__(self, journal: str = "memory", since: float | None = None) -> None:
        """`journal`: its kind; `since`: start, unix seconds."""
        self._address = ""
        self._journal = journal
        self._since = since

    def listen(self, address: str) -> None:
        """Set the address on which it listens."""
        self._address = address

    def __call__(self, run_id: str) -> pb.ListReplicasResponse:
        """Return the response of ListReplicas."""
        name = socket.gethostname()
        replica = pb.Replica(name=name, address=self._address, instance=INSTANCE, shards=1)
        if self._since is not None:
            set_seconds(replica.since, self._since)
        response = pb.ListReplicasResponse(
            replicas=[replica], answered_by=name, journal=self._journal, shards=1
        )
        if run_id:
            response.run.MergeFrom(pb.RunPlace(shard=0, owner_name=name, owner_address=self._address))
        return response
