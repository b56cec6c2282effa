"""Where runs are when several replicas share them: here, with another one, or with nobody just now."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rallypoint.rendezvous.base.errors import EtcdAway, EtcdFull, NotOwner
from rallypoint.rendezvous.reader import RunReader
from rallypoint.rendezvous.replicas.elsewhere import Elsewhere
from rallypoint.rendezvous.replicas.placement import shard_of
from rallypoint.rendezvous.replicas.replica import Replica
from rallypoint.rendezvous.shard import Shard


class ReplicatedHome:
    """The runs of all replicas, as one of them sees them. A Home."""

    def __init__(self, replica: Replica, elsewhere: Elsewhere, full: Callable[[], str] = lambda: "") -> None:
        """See with the eyes of `replica`.

        Args:
            replica: What is here.
            elsewhere: Reads what is not.
            full: Why etcd takes no writes; empty as long as it does.
        """
        self._replica = replica
        self._elsewhere = elsewhere
        self._full = full

    def shard(self, run_id: str) -> Shard:
        """The shard of a run, if this replica serves it.

        Raises:
            NotOwner: It does not; with the address of the one that does, if any does.
            EtcdAway: Who does is not known here, for there is no etcd.
        """
        replica = self._replica
        if replica.hosting is None or replica.cluster is None:
            raise EtcdAway
        number = shard_of(run_id, replica.shards)
        shard = replica.hosting.serving.get(number)
        if shard is not None:
            return shard
        raise NotOwner(run_id, replica.owner_address(number), replica.hosting.obstacle(number))

    def writer(self, run_id: str) -> Shard:
        """The same, for what writes.

        Raises:
            NotOwner, EtcdAway: As of `shard`.
            EtcdFull: etcd takes no writes at the moment.
        """
        shard = self.shard(run_id)
        if cause := self._full():
            raise EtcdFull(cause)
        return shard

    async def reader(self, run_id: str) -> RunReader:
        """Who answers reads of a run: its shard if that is here, otherwise what etcd has of it.

        So too where etcd is full: what the shard has under way may not be settled before somebody makes room.

        Raises:
            EtcdAway: There is no etcd just now.
            NotOwner: It is better read where it is.
        """
        if self._replica.cluster is None:
            raise EtcdAway  # at once: others may have one
        number = shard_of(run_id, self._replica.shards)
        hosting = self._replica.hosting
        shard = hosting.serving.get(number) if hosting is not None else None
        if shard is not None and not self._full():
            # Others may have read of etcd what it does not know yet to be durable.
            await shard.settled()
            return shard
        try:
            return await self._elsewhere.reader(number)
        except NotOwner as elsewhere:
            raise NotOwner(run_id, elsewhere.owner) from None

    async def readers(self) -> Sequence[RunReader]:
        """Those of all shards.

        Raises:
            EtcdAway: There is no etcd just now.
        """
        if self._replica.cluster is None:
            raise EtcdAway  # at once: others may have one
        here = dict(self._replica.hosting.serving) if self._replica.hosting is not None else {}
        shards = self._replica.shards
        elsewhere = await self._elsewhere.readers(
            [each for each in range(shards) if each not in here], shards
        )
        return [*here.values(), *elsewhere.values()]

    def shards(self) -> Sequence[Shard]:
        """All that have not ended here."""
        return self._replica.hosting.shards() if self._replica.hosting is not None else []
