"""One replica: sessions with etcd, one after another, and in each its share of the shards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from rallypoint.etcd.client import EtcdClient, check_versions
from rallypoint.etcd.errors import REMEDIES, Compacted, EtcdError, EtcdRefused, Reason
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, Delete, Txn
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.cluster.keys import Keys, agreed_shards
from rallypoint.rendezvous.cluster.ownership import MoveSettings, decide
from rallypoint.rendezvous.cluster.registering import register, wait_for_name, withdraw
from rallypoint.rendezvous.cluster.shard_manager import ShardManager
from rallypoint.rendezvous.cluster.view import Cluster, ReplicaRegistration
from rallypoint.rendezvous.journal.etcd.keys import Owner
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.loop import Notifier, boot_time
from rallypoint.rpc.pace import Pace

_log = get_logger(__name__)

# Longest random delay between two attempts at a session, seconds. It prolongs an outage of etcd by as much.
_LONGEST_BACKOFF = 2.0
# Seconds that a draining replica may take to hand its shards over; the rest becomes free with its lease.
_DRAIN_WITHIN = 15.0

# Errors that only a person can fix, not a retry.
_HOPELESS = frozenset({Reason.PERMISSION_DENIED, Reason.UNAUTHENTICATED, Reason.NOT_ETCD, Reason.INVALID})

ClaimShard = Callable[[Session, int, Callable[[BaseException], None]], Awaitable[Shard]]
"""Becomes the owner of a shard in a session; see `OpenShard`."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Settings of a set of replicas.

    Attributes:
        lease_ttl: Seconds after which a replica that died or can't reach etcd has lost its shards. A shorter time makes
            take-over faster, but a pause of that length counts as death.
        shards: Number of shards of a new prefix; None: the default, or the prefix's present number.
        moves: Speed of moving shards.
        keeps_etcd: True if the readers of this replica's log operate the etcd: problems of its members are warnings;
            otherwise they are logged at info.
        keys_end: True if all keys of the prefix expire with a lease, except those that hold a `HighWater`.
    """

    lease_ttl: float = 10.0
    shards: int | None = None
    moves: MoveSettings = field(default_factory=MoveSettings)
    keeps_etcd: bool = True
    keys_end: bool = False


OnReady = Callable[[bool], Awaitable[None]]
"""Called with True when a replica begins to serve runs, with False when it ceases to."""


async def ignore_ready(ready: bool) -> None:
    """Ignore the change."""


class Replica:
    """Serves its share of the shards of a prefix while `serve` runs.

    Attributes:
        keys: Keys of the prefix.
        name: Its name; empty before it serves.
        registration: Its registration in etcd.
        shards: Number of shards of the prefix; 0: not known yet.
        cluster: The live replicas and the owners of shards; None while there is no session.
        shard_manager: The shards served here; None while there is no session.
        draining: True if it drains.
    """

    def __init__(
        self,
        client: EtcdClient,
        claim: ClaimShard,
        instance: str,
        *,
        wanted: Replicas,
        clock: Callable[[], float],
        lease_clock: Callable[[], float] = boot_time,
        pace: Pace | None = None,
        on_ready: OnReady = ignore_ready,
    ) -> None:
        """Set up; `serve` makes it work.

        Args:
            client: Client of the etcd; its address has the prefix.
            claim: Claims a shard.
            instance: Random id of this process, different from any other's.
            wanted: Settings of all replicas.
            clock: Monotonic seconds.
            lease_clock: Seconds that continue while the machine is suspended.
            pace: Delays between attempts.
            on_ready: Called with True when this replica begins to serve runs, with False when it ceases to.
        """
        self._client = client
        self.keys = Keys(client.address.prefix)
        self.name = ""
        self.registration = ReplicaRegistration("", instance, 0.0, wanted.lease_ttl)
        self._claim = claim
        self._wanted = wanted
        self._clock = clock
        self._lease_clock = lease_clock
        self._pace = pace or Pace()
        self._on_ready = on_ready
        self._changes = Notifier()
        self._sessions = 0
        self._lost_at: float | None = None
        self._advised: set[str] = set()
        self.shards = 0
        self.cluster: Cluster | None = None
        self.shard_manager: ShardManager | None = None
        self.draining = False

    @property
    def _counted(self) -> bool:
        """True if this replica is registered, as far as known here."""
        there = self.cluster.live.get(self.name) if self.cluster is not None else None
        return there is not None and there.instance == self.registration.instance

    @property
    def me(self) -> Owner:
        """This replica, as the owner of a shard."""
        return Owner(self.name, self.registration.address, self.registration.instance)

    def owner_address(self, shard: int) -> str | None:
        """Return the address of a shard's owner; None if there is none, or it is this replica, or unknown."""
        if self.cluster is None or (owned := self.cluster.owned.get(shard)) is None:
            return None
        # A request for our own shard: it is being claimed or handed over, and our address would be a circle.
        return None if owned.owner.instance == self.registration.instance else owned.owner.address

    def refuse_if_not_owner(self, shard: int) -> None:
        """Raise NotOwner if another replica is known to own a shard."""
        if (address := self.owner_address(shard)) is not None:
            raise NotOwner("", address)

    async def serve(self, name: str, address: str, since: float) -> None:
        """Serve until cancelled or drained: start again, with nothing kept, whenever the session is lost.

        Args:
            name: Name of this replica: no two live ones have the same.
            address: Its address for clients.
            since: Unix seconds, for people.

        Raises:
            SettingError: It can't serve, and a retry would not help; one line.
        """
        self.name = name
        self.registration = replace(self.registration, address=address, since=since)
        backoff, logged = self._pace.backoff(_LONGEST_BACKOFF), ""
        while not self.draining:
            began, sessions = self._clock(), self._sessions
            try:
                await self._one_session()
            except EtcdError as error:
                if not self._sessions and isinstance(error, EtcdRefused) and error.reason in _HOPELESS:
                    remedy = f"; {REMEDIES[error.reason]}" if error.reason in REMEDIES else ""
                    raise SettingError(f"{self._client.address} refuses us: {error}{remedy}") from error
                # Once, not at each attempt: an outage may last. A refusal is logged apart from an outage. The end of a
                # session was logged when it came.
                if self._sessions == sessions and logged != type(error).__name__:
                    _log.warning("no session with etcd: runs wait until there is one", error=str(error))
                logged = type(error).__name__ if self._sessions == sessions else ""
            if self._sessions > sessions and self._clock() - began > self._wanted.lease_ttl:
                backoff.reset()
            await self._pace.sleep(backoff.next())

    async def drain(self, *, finished: bool = False) -> None:
        """Withdraw the registration, then hand over every shard. Bounded.

        Reads are answered until the end; streams of a shard end when its next owner is known.

        Args:
            finished: The runs of this replica are over: do not wait for another replica to claim their shards.
        """
        self.draining = True
        await self._on_ready(False)
        if (manager := self.shard_manager) is None:
            return
        try:
            async with asyncio.timeout(_DRAIN_WITHIN):
                with suppress(EtcdError):  # it is deleted with the lease in any case
                    await withdraw(self._client, self.keys, self.name, self.registration)
                    # The view then has all replicas that came before, so our shards go to one of them if there is any.
                    await self._changes.until(lambda: not self._counted or self.shard_manager is not manager)
                manager.finished = finished
                manager.draining = True
                self._changes.notify()
                await self._changes.until(lambda: manager.empty or self.shard_manager is not manager)
        except TimeoutError:
            _log.warning("not every shard was handed over in time", within=_DRAIN_WITHIN)
        manager.flush_log()

    async def _one_session(self) -> None:
        """Open a session and serve in it until it ends.

        Raises:
            EtcdError: There is no session, or it was lost.
            SettingError: A retry would not help.
        """
        if not self._sessions:
            await self._read_cluster()
        if not self.draining:
            # Before there is a lease to keep: this waits as long as another replica's lease lasts.
            await wait_for_name(self._client, self.keys, self.name, self.registration)
        session = await Session.open(
            self._client, self._wanted.lease_ttl, clock=self._lease_clock, pace=self._pace
        )
        try:
            shards = await agreed_shards(self._client, self.keys, self._wanted.shards)
            if not self.draining:
                await register(self._client, session, self.keys, self.name, self.registration)
            cluster = Cluster(self.keys, shards)
            snapshot = await self._client.get(*self.keys.watched)
            cluster.read(snapshot.pairs, self._clock())
            await self._run_session(session, cluster, snapshot.revision)
        finally:
            await session.close()

    async def _read_cluster(self) -> None:
        """Log advice on etcd's members for operators."""
        try:
            for advice in await check_versions(self._client):
                if advice not in self._advised:
                    self._advised.add(advice)
                    log = _log.warning if self._wanted.keeps_etcd else _log.info
                    log("etcd", advice=advice)
        except EtcdRefused as error:
            if error.reason is not Reason.PERMISSION_DENIED:  # the permission to read this is optional
                raise

    async def _run_session(self, session: Session, cluster: Cluster, revision: int) -> None:
        manager = ShardManager(
            cluster,
            self.me,
            open_shard=partial(self._claim, session),
            release=self._release,
            changes=self._changes,
            moves=self._wanted.moves,
            clock=self._clock,
        )
        manager.draining = self.draining
        self.shards, self.cluster, self.shard_manager = cluster.shards, cluster, manager
        self._sessions += 1
        if not self.draining:
            await self._on_ready(True)
        again = {} if self._lost_at is None else {"away": round(self._clock() - self._lost_at, 3)}
        _log.info("session with etcd", lease=f"{session.lease:x}", replicas=sorted(cluster.live), **again)
        parts = [
            asyncio.create_task(session.lost()),
            asyncio.create_task(self._follow(session, cluster, revision)),
            asyncio.create_task(self._act(manager)),
        ]
        lost = False
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            lost = True
        finally:
            # All of this at once, before anything slow: other replicas may own the shards by now.
            dropped = [shard.engine.run_count for shard in manager.serving.values()]
            manager.halt()
            self.cluster = self.shard_manager = None
            if lost:
                self._lost_at = self._clock()
                error = _end_reason(session, parts)
                _log.warning(
                    "session with etcd lost, all shards dropped",
                    shards=len(dropped),
                    runs=sum(dropped),
                    error=error,
                )
            await self._on_ready(False)
            await _end(parts)
            await manager.ended()
        for part in parts:
            if not part.cancelled():
                part.result()  # raises the error that ended the watch or a decision
        session.check()

    async def _follow(self, session: Session, cluster: Cluster, revision: int) -> None:
        """Keep the cluster up to date, and this replica registered in it."""
        while True:
            try:
                async with aclosing(self._client.watch(*self.keys.watched, revision + 1)) as watching:
                    async for changes in watching:
                        cluster.apply(changes, self._clock())
                        await self._on_cluster_change(session, cluster)
            except Compacted:
                snapshot = await self._client.get(*self.keys.watched)
                revision = snapshot.revision
                cluster.read(snapshot.pairs, self._clock())
                await self._on_cluster_change(session, cluster)

    async def _on_cluster_change(self, session: Session, cluster: Cluster) -> None:
        if self.shard_manager is not None:
            self.shard_manager.drop_lost_shards()
        self._changes.notify()
        if not self.draining and self.name not in cluster.live:
            _log.warning("this replica's registration was deleted; registering again")
            await register(self._client, session, self.keys, self.name, self.registration)

    async def _act(self, manager: ShardManager) -> None:
        while True:
            seen = self._changes.count
            now = self._clock()
            decision = decide(manager.state(), now, self._wanted.moves)
            for action in decision.actions:
                manager.begin(action)
            look = decision.decide_again_at
            await self._changes.since(seen, None if look is None else max(0.0, look - now))

    async def _release(self, shard: int, fence: int) -> None:
        key = self.keys.owner(shard)
        await self._client.transact(Txn([CreateRevision(key, fence)], [Delete(key)]))


def _end_reason(session: Session, parts: Sequence[asyncio.Task[None]]) -> str:
    """Return the reason for the end of a session, for people."""
    for part in parts:
        if part.done() and not part.cancelled() and (error := part.exception()) is not None:
            return str(error)
    try:
        session.check()
    except EtcdError as error:
        return str(error)
    return "it ended"


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
