"""The owners of runs that several replicas share: this replica, another one, or none at the moment."""

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
from rallypoint.rendezvous.shard.reader import ReadOnlyRuns, RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import set_seconds

# ---- One read for all concurrent callers.


_T = TypeVar("_T")


class SharedRead(Generic[_T]):
    """Runs one read at a time, and shares the next one among all callers that arrive during it.

    They share the next read and not the one in flight: that one may have looked before an event that a caller already
    knows. So every caller sees everything that was done before its call.
    """

    def __init__(self, read: Callable[[], Awaitable[_T]]) -> None:
        """Read with `read`, never twice at a time."""
        self._read = read
        self._current: asyncio.Task[_T] | None = None
        self._next: asyncio.Task[_T] | None = None

    async def read(self) -> _T:
        """Return the result, or raise the exception, of a read that begins after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._after(self._current))
            self._next.add_done_callback(self._done)
        # A caller that is cancelled must not cancel the read of the others.
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
            task.exception()  # mark as retrieved: perhaps no caller waits for it any more


# ---- Shards of other replicas, read here: from etcd, and cached while they don't change.


_MOST_BYTES = 64 * 1024 * 1024
"""Limit of the cache, in bytes as stored in etcd; in memory it is several times that. A larger cache saves reading
large, rarely changed shards again."""

# Heads read in one request: etcd takes 128 operations.
_HEADS = 100
# Shards read in parallel if all are wanted.
_READS = 8
# Seconds. A shard that took longer than this to read is read for at most a twentieth of the time: a large shard that
# changes all the time is better read from its owner's memory.
_LONG = 0.1
_REST = 20.0
# Longest rest, seconds: an outage of etcd also makes a read take long, and says nothing about the shard.
_LONGEST_REST = 10.0


@dataclass(slots=True)
class _Kept:
    revision: int
    reader: ReadOnlyRuns
    bytes: int
    rest_until: float


class RemoteReader:
    """Reads durable shards linearizably: every caller sees all commits acknowledged before its call."""

    def __init__(
        self,
        client: EtcdClient,
        keys: Keys,
        build: Callable[[int, Recovered], Work[ReadOnlyRuns]],
        *,
        refuse: Callable[[int], None],
        clock: Callable[[], float],
        runner: CooperativeRunner | None = None,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Read nothing yet.

        Args:
            client: Client of the etcd.
            keys: Keys of the prefix.
            build: Makes a reader from the contents of a shard's journal.
            refuse: Raises NotOwner with the owner's address if another replica owns the shard.
            clock: Monotonic seconds.
            runner: Runs the parsing; shared with other long work of the process. None: a new one.
            most_bytes: Limit of the cache of read shards; the latest is always kept.
        """
        self._client = client
        self._keys = keys
        self._build = build
        self._refuse = refuse
        self._clock = clock
        self._runner = runner or CooperativeRunner()
        self._most_bytes = most_bytes
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self._reads: dict[int, SharedRead[ReadOnlyRuns]] = {}
        # Shards whose next read must not be refused, however long it takes: a caller of `readers` shares it.
        self._not_refused: set[int] = set()
        self._heads: SharedRead[Mapping[int, int]] = SharedRead(self._read_heads)
        self._shards = 0

    async def reader(self, shard: int) -> ReadOnlyRuns:
        """Return a reader of the present state of a shard.

        Raises:
            EtcdAway: etcd does not reply, or refuses.
            NotOwner: It is large, changes all the time, and has an owner to be used instead.
            JournalError: Its contents can't be read by this version.
        """
        read = self._reads.get(shard)
        if read is None:
            read = self._reads[shard] = SharedRead(partial(self._read, shard))
        try:
            return await read.read()
        except EtcdError as error:
            raise EtcdAway from error

    async def readers(self, wanted: Collection[int], shards: int) -> dict[int, ReadOnlyRuns]:
        """Return readers of several of all `shards` shards: with one request, if most did not change.

        The caller is never redirected to an owner: that one would redirect it for the shards of others, and so on.

        Raises:
            EtcdAway, JournalError: As `reader`.
        """
        self._shards = shards
        try:
            heads = await self._heads.read()
        except EtcdError:
            heads = {}  # one attempt at one member; the read of each shard makes more
        found = {
            shard: kept.reader
            for shard in wanted
            if (kept := self._kept.get(shard)) is not None and heads.get(shard) == kept.revision
        }
        room = asyncio.Semaphore(_READS)

        async def read(shard: int) -> None:
            async with room:
                # No await between the mark and joining the read: the shared read takes the mark as it begins.
                self._not_refused.add(shard)
                found[shard] = await self.reader(shard)

        await asyncio.gather(*(read(shard) for shard in wanted if shard not in found))
        return found

    async def _read_heads(self) -> Mapping[int, int]:
        """Return the revision of every shard's head; 0 if there is none."""
        found: dict[int, int] = {}
        for first in range(0, self._shards, _HEADS):
            batch = range(first, min(first + _HEADS, self._shards))
            heads = [Get(self._keys.space(shard) + HEAD, keys_only=True) for shard in batch]
            answer = await self._client.transact(Txn([], heads))
            for shard, pairs in zip(batch, answer.found, strict=True):
                found[shard] = pairs[0].mod_revision if pairs else 0
        return found

    async def _read(self, shard: int) -> ReadOnlyRuns:
        may_refuse = shard not in self._not_refused
        self._not_refused.discard(shard)
        space = self._keys.space(shard)
        kept = self._kept.get(shard)
        # Read from etcd's leader, after the caller's request: if there was no commit since, the cache is up to date.
        if kept is not None:
            if await head_revision(self._client, space) == kept.revision:
                self._kept.move_to_end(shard)
                return kept.reader
            if may_refuse and self._clock() < kept.rest_until:
                self._refuse(shard)
        began = self._clock()
        pairs = await read_pairs(self._client, space)
        kept = await self._runner.carry_out(self._keeping(shard, pairs, self._clock() - began))
        self._kept[shard] = kept
        self._kept.move_to_end(shard)
        self._keep_within()
        return kept.reader

    def _keeping(self, shard: int, pairs: Sequence[KeyValue], reading: float) -> Work[_Kept]:
        """Build the cache entry of a shard whose keys took so many seconds to arrive."""
        began = self._clock()
        size = 0
        for pair in pairs:
            size += len(pair.key) + len(pair.value)
            yield
        found = yield from interpret(self._keys.space(shard), pairs)
        reader = yield from self._build(shard, found.recovered)
        now = self._clock()
        took = reading + now - began
        rest = min(_REST * took, _LONGEST_REST) if took > _LONG else 0.0
        return _Kept(found.head_revision, reader, size, now + rest)

    def _keep_within(self) -> None:
        total = sum(kept.bytes for kept in self._kept.values())
        while total > self._most_bytes and len(self._kept) > 1:
            _, dropped = self._kept.popitem(last=False)
            total -= dropped.bytes


class ReplicatedLocator:
    """Locates the runs of all replicas, as seen by one of them. A RunLocator."""

    def __init__(self, replica: Replica, remote: RemoteReader, full: Callable[[], str] = lambda: "") -> None:
        """Locate runs for `replica`.

        Args:
            full: Returns the reason why etcd accepts no writes; empty if it does.
        """
        self._replica = replica
        self._remote = remote
        self._full = full

    def shard(self, run_id: str) -> Shard:
        """Return the shard of a run, if this replica serves it.

        Raises:
            NotOwner: It does not; with the address of the owner, if there is one.
            EtcdAway: The owner is unknown, since there is no session with etcd.
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
        """Return the same for a write.

        Raises:
            NotOwner, EtcdAway: As of `shard`.
            EtcdFull: etcd takes no writes at the moment.
        """
        shard = self.shard(run_id)
        if cause := self._full():
            raise EtcdFull(cause)
        return shard

    async def reader(self, run_id: str) -> RunReader:
        """Return a reader of a run: its shard if this replica serves it, otherwise one of the data in etcd.

        The latter also while etcd is full: commits in flight of the shard may not end before an operator makes room.

        Raises:
            EtcdAway: There is no session with etcd at the moment.
            NotOwner: The run is better read from its owner.
        """
        if self._replica.cluster is None:
            raise EtcdAway  # at once: other replicas may have a session
        number = shard_of(run_id, self._replica.shards)
        manager = self._replica.shard_manager
        shard = manager.serving.get(number) if manager is not None else None
        if shard is not None and not self._full():
            # Other replicas may have read commits from etcd that this one does not yet know to be durable.
            await shard.settled()
            return shard
        try:
            return await self._remote.reader(number)
        except NotOwner as refusal:
            raise NotOwner(run_id, refusal.owner) from None

    async def readers(self) -> Sequence[RunReader]:
        """Return readers of all shards; raise EtcdAway if there is no session with etcd."""
        if self._replica.cluster is None:
            raise EtcdAway  # at once: other replicas may have a session
        here = dict(self._replica.shard_manager.serving) if self._replica.shard_manager is not None else {}
        shards = self._replica.shards
        remote = await self._remote.readers([each for each in range(shards) if each not in here], shards)
        return [*here.values(), *remote.values()]

    def shards(self) -> Sequence[Shard]:
        """Return all shards that have not ended here."""
        return self._replica.shard_manager.shards() if self._replica.shard_manager is not None else []


# ---- ListReplicas: the replicas and their shards, as one replica knows them.


def list_replicas(replica: Replica, run_id: str) -> pb.ListReplicasResponse:
    """Return all known replicas, and the owner of a run; `run_id` "": of no run.

    Raises:
        EtcdAway: Nothing is known: there is no session with etcd at the moment.
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
            owner = owned.owner
            response.run.owner_name, response.run.owner_address = owner.replica, owner.address
    return response


def _replicas(cluster: Cluster) -> list[pb.Replica]:
    counts = Counter(owned.owner for owned in cluster.owned.values())
    found = []
    for name, registration in cluster.live.items():
        replica = pb.Replica(name=name, address=registration.address, instance=registration.instance)
        set_seconds(replica.since, registration.since)
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
