"""Where runs are when several replicas share them: here, with another one, or with nobody just now."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdError
from rallypoint.etcd.values import Get, KeyValue, Txn
from rallypoint.rendezvous.base.cooperative import CooperativeRunner, Work
from rallypoint.rendezvous.base.errors import EtcdAway, EtcdFull, NotOwner
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.ownership import shard_of
from rallypoint.rendezvous.cluster.replica import Replica
from rallypoint.rendezvous.cluster.view import Cluster
from rallypoint.rendezvous.journal.etcd.keys import HEAD
from rallypoint.rendezvous.journal.etcd.reading import head_revision, interpret, read_pairs
from rallypoint.rendezvous.journal.journal import Recovered
from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb

# ---- One read for all who want it at the same time.


_T = TypeVar("_T")


class SharedRead(Generic[_T]):
    """Reads something for whoever asks, once for all who ask while another read is under way.

    They share the next one and not the one under way: that may have looked before something happened which they know
    of already. So whoever asks sees everything that was done before it asked.
    """

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        """Read with `read`, never twice at a time."""
        self._read = read
        self._current: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def read(self) -> _T:
        """What a read finds that begins after this was called.

        Raises:
            Exception: What the read raises.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._current))
            self._next.add_done_callback(self._done)
        # Whoever gives up takes nothing from the others.
        return await asyncio.shield(self._next)

    async def _after(self, current: asyncio.Task[_T] | None) -> _T:
        if current is not None:
            await asyncio.wait({current})
        self._current, self._next = self._next, None
        return await self._read()

    def _done(self, task: asyncio.Task[_T]) -> None:
        if self._current is task:
            self._current = None
        if not task.cancelled():
            task.exception()  # nobody may be waiting for it any more


# ---- Shards whose owner is another replica, to be read here: from etcd, and kept while they don't change.


_MOST_BYTES = 64 * 1024 * 1024
"""Of what is kept, as it is in etcd; in memory it takes some times that. More spares reading large shards again that
change seldom."""

# Heads that are looked at in one request: etcd takes 128 operations.
_HEADS = 100
# Shards that are read at a time where all are wanted.
_READS = 8
# A shard that took longer than this to read, seconds, is read for a twentieth of the time at most: a large one that
# changes all the time is better read where it is in memory.
_LONG = 0.1
_REST = 20.0


@dataclass(slots=True)
class _Kept:
    revision: int
    reader: RunReader
    bytes: int
    rest_until: float


class RemoteReader:
    """Reads shards as they are durable, linearizably: whoever asks sees every commit that was told before it asked."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        build: Callable[[int, Recovered], Work[RunReader]],
        *,
        refuse: Callable[[int], None],
        clock: Callable[[], float],
        slices: CooperativeRunner | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Read nothing yet.

        Args:
            client: Of the etcd.
            keys: Of the prefix.
            build: Makes a reader of what the journal of a shard holds.
            refuse: Sends whoever wants to read a shard to its owner, by raising NotOwner, if it has one elsewhere.
            clock: Monotonic seconds.
            slices: Where what was read is built; whatever else takes long in the process shares it. None: nothing does.
            most_bytes: What is kept of shards that were read, the latest read first; one is always kept.
        """
        self._client = client
        self._keys = keys
        self._build = build
        self._refuse = refuse
        self._clock = clock
        self._slices = slices or CooperativeRunner()
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._reads: dict[int, SharedRead[RunReader]] = {}
        # Shards that are read next however long it takes: somebody who shares that read must not be refused.
        self._not_refused: set[int] = set()
        self._heads: SharedRead[Mapping[int, int]] = SharedRead(self._read_heads)
        self._shards = 0

    async def reader(self, shard: int) -> RunReader:
        """A shard as it is now.

        Raises:
            EtcdAway: etcd does not answer, or refuses.
            NotOwner: It is large, changes all the time, and has an owner who should be asked.
            JournalError: What is there can't be read by this version.
        """
        return await self._read_shard(shard)

    async def _read_shard(self, shard: int) -> RunReader:
        read = self._reads.get(shard)
        if read is None:
            read = self._reads[shard] = SharedRead(partial(self._read, shard))
        try:
            return await read.read()
        except EtcdError as error:
            raise EtcdAway from error

    async def readers(self, wanted: Collection[int], shards: int) -> dict[int, RunReader]:
        """Several of all `shards` shards: in one request, where most did not change.

        Nobody is sent to an owner: who wants them all would be sent on by that one, for the shards of others, and on.

        Raises:
            EtcdAway, JournalError: As `reader`.
        """
        self._shards = shards
        try:
            heads = await self._heads.read()
        except EtcdError:
            heads = {}  # one attempt at one member; each shard of its own has more
        found = {
            shard: kept.reader
            for shard in wanted
            if (kept := self._kept.get(shard)) is not None and heads.get(shard) == kept.revision
        }
        room = asyncio.Semaphore(_READS)

        async def read(shard: int) -> None:
            async with room:
                # In one step with asking: it is the read that we share which takes note of it.
                self._not_refused.add(shard)
                found[shard] = await self._read_shard(shard)

        await asyncio.gather(*(read(shard) for shard in wanted if shard not in found))
        return found

    async def _read_heads(self) -> Mapping[int, int]:
        """The revision of every shard's head that there is; 0 where there is none."""
        found: dict[int, int] = {}
        for first in range(0, self._shards, _HEADS):
            batch = range(first, min(first + _HEADS, self._shards))
            heads = [Get(self._keys.space(shard) + HEAD, keys_only=True) for shard in batch]
            answer = await self._client.transact(Txn([], heads))
            for shard, pairs in zip(batch, answer.found, strict=True):
                found[shard] = pairs[0].mod_revision if pairs else 0
        return found

    async def _read(self, shard: int) -> RunReader:
        may_refuse = shard not in self._not_refused
        self._not_refused.discard(shard)
        space = self._keys.space(shard)
        kept = self._kept.get(shard)
        # Read of etcd's leader, after whoever asks has asked: if it says that nothing was committed since, what we have
        # is the present.
        if kept is not None:
            if await head_revision(self._client, space) == kept.revision:
                self._kept.move_to_end(shard)
                return kept.reader
            if may_refuse and self._clock() < kept.rest_until:
                self._refuse(shard)
        began = self._clock()
        pairs = await read_pairs(self._client, space)
        kept = await self._slices.carry_out(self._keeping(shard, pairs, self._clock() - began))
        self._kept[shard] = kept
        self._kept.move_to_end(shard)
        self._keep_within()
        return kept.reader

    def _keeping(self, shard: int, pairs: Sequence[KeyValue], reading: float) -> Work[_Kept]:
        """What is kept of a shard whose keys took so many seconds to come."""
        began = self._clock()
        size = 0
        for pair in pairs:
            size += len(pair.key) + len(pair.value)
            yield
        found = yield from interpret(self._keys.space(shard), pairs)
        reader = yield from self._build(shard, found.recovered)
        now = self._clock()
        took = reading + now - began
        return _Kept(found.head_revision, reader, size, now + (_REST * took if took > _LONG else 0.0))

    def _keep_within(self) -> None:
        total = sum(kept.bytes for kept in self._kept.values())
        while total > self._most_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.bytes


class ReplicatedLocator:
    """The runs of all replicas, as one of them sees them. A Home."""

    def __init__(
        self, replica: Replica, elsewhere: RemoteReader, full: Callable[[], str] = lambda: ""
    ) -> None:
        """See with the eyes of `replica`.

        Args:
            replica: What is here.
            elsewhere: Reads what is not.
            full: Why etcd takes no writes; empty as long as it does.
        """
        self._replica = replica
        self._remote = elsewhere
        self._full = full

    def shard(self, run_id: str) -> Shard:
        """The shard of a run, if this replica serves it.

        Raises:
            NotOwner: It does not; with the address of the one that does, if any does.
            EtcdAway: Who does is not known here, for there is no etcd.
        """
        replica = self._replica
        if replica.shard_manager is None or replica.cluster is None:
            raise EtcdAway
        number = shard_of(run_id, replica.shards)
        shard = replica.shard_manager.serving.get(number)
        if shard is not None:
            return shard
        raise NotOwner(run_id, replica.owner_address(number), replica.shard_manager.obstacle(number))

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
        hosting = self._replica.shard_manager
        shard = hosting.serving.get(number) if hosting is not None else None
        if shard is not None and not self._full():
            # Others may have read of etcd what it does not know yet to be durable.
            await shard.settled()
            return shard
        try:
            return await self._remote.reader(number)
        except NotOwner as elsewhere:
            raise NotOwner(run_id, elsewhere.owner) from None

    async def readers(self) -> Sequence[RunReader]:
        """Those of all shards.

        Raises:
            EtcdAway: There is no etcd just now.
        """
        if self._replica.cluster is None:
            raise EtcdAway  # at once: others may have one
        here = dict(self._replica.shard_manager.serving) if self._replica.shard_manager is not None else {}
        shards = self._replica.shards
        elsewhere = await self._remote.readers([each for each in range(shards) if each not in here], shards)
        return [*here.values(), *elsewhere.values()]

    def shards(self) -> Sequence[Shard]:
        """All that have not ended here."""
        return self._replica.shard_manager.shards() if self._replica.shard_manager is not None else []


# ---- ListReplicas: who serves what, as one replica knows it.


def list_replicas(replica: Replica, run_id: str) -> pb.ListReplicasResponse:
    """What a replica knows of all of them, and of who owns a run; "": of no run.

    Raises:
        EtcdAway: It knows nothing: there is no etcd just now.
    """
    cluster = replica.cluster
    if cluster is None:
        raise EtcdAway
    response = pb.ListReplicasResponse(
        answered_by=replica.name,
        journal="etcd",
        shards=cluster.shards,
        free_shards=len(cluster.free),
        replicas=_replicas(cluster),
    )
    if run_id:
        shard = shard_of(run_id, cluster.shards)
        response.run.shard = shard
        if (owned := cluster.owned.get(shard)) is not None:
            response.run.owner, response.run.address = owned.owner.replica, owned.owner.address
    return response


def _replicas(cluster: Cluster) -> list[pb.Replica]:
    counts = Counter(owned.owner for owned in cluster.owned.values())
    found = []
    for name, registration in cluster.live.items():
        replica = pb.Replica(name=name, address=registration.address, instance=registration.instance)
        replica.since.FromNanoseconds(round(registration.since * 1e9))
        replica.shards = sum(
            count for owner, count in counts.items() if owner.instance == registration.instance
        )
        found.append(replica)
    instances = {registration.instance for registration in cluster.live.values()}
    for owner, count in counts.items():
        if owner.instance not in instances:
            found.append(
                pb.Replica(
                    name=owner.replica,
                    address=owner.address,
                    instance=owner.instance,
                    shards=count,
                    leaving=True,
                )
            )
    return sorted(found, key=lambda replica: (replica.name, replica.instance))
