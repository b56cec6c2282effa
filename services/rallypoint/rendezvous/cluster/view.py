"""Who is alive and who owns which shard, as etcd tells it: kept up to date by one watch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from rallypoint.etcd.values import Change, KeyValue
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.keys import Owner

# ---- What a replica says of itself to the others.


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """One replica that is alive.

    Attributes:
        address: How clients reach it: host:port.
        instance: Drawn anew by each process: tells a replica from the one of its name before.
        since: When the process began to serve, unix seconds; for people.
        lease_ttl: Seconds after which it is gone from etcd if it dies.
    """

    address: str
    instance: str
    since: float
    lease_ttl: float

    def encode(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> ReplicaRegistration | None:
        """From JSON; None if it is none. Fields that a newer version adds are left alone."""
        try:
            fields = json.loads(content)
            return cls(
                str(fields["address"]),
                str(fields["instance"]),
                float(fields["since"]),
                float(fields["lease_ttl"]),
            )
        except (ValueError, KeyError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class Owned:
    """Who owns a shard, and since which revision: the shard's fencing token."""

    owner: Owner
    fence: int


@dataclass(frozen=True, slots=True)
class PreviousOwner:
    """Who owned a shard that is free, or was; `ended`: its lease did, so that it is gone or was cut off from etcd."""

    owner: Owner
    ended: bool


class Cluster:
    """Registrations and owner keys. It may be behind etcd, and is never ahead of it.

    Attributes:
        live: Replicas that are registered, by name.
        live_since: When their instances last changed, seconds of the clock that `now` is of.
        owned: Shards that somebody owns.
        free: The other ones, and since when that is known.
        before: Of shards that were seen to become free, who had them; for people.
        shards: How many there are.
    """

    def __init__(self, keys: Keys, shards: int) -> None:
        """Know nothing: nobody is alive, and no shard is known to be free."""
        self._keys = keys
        self.shards = shards
        self.live: dict[str, ReplicaRegistration] = {}
        self.live_since = float("-inf")
        self.owned: dict[int, Owned] = {}
        self.free: dict[int, float] = {}
        self.before: dict[int, PreviousOwner] = {}

    def read(self, pairs: Iterable[KeyValue], now: float) -> None:
        """Begin anew with all that there is."""
        live, free = self.live, self.free
        self.live, self.owned = {}, {}
        for pair in pairs:
            self._put(pair)
        self.free = {shard: free.get(shard, now) for shard in range(self.shards) if shard not in self.owned}
        if self.live != live:
            self.live_since = now

    def apply(self, changes: Sequence[Change], now: float) -> None:
        """Take in what changed."""
        live = dict(self.live)
        # What a lease took with it went in one revision; who hands a shard over deletes its key and nothing else.
        ended = {
            change.revision
            for change in changes
            if change.deleted and self._keys.replica_named(change.pair.key) is not None
        }
        for change in changes:
            if change.deleted:
                self._delete(change.pair.key, now, ended=change.revision in ended)
            else:
                self._put(change.pair)
        if self.live != live:
            self.live_since = now

    def _put(self, pair: KeyValue) -> None:
        name = self._keys.replica_named(pair.key)
        if name is not None and (registration := ReplicaRegistration.decode(pair.value)) is not None:
            self.live[name] = registration
        shard = self._keys.shard_owned(pair.key)
        if shard is not None and shard < self.shards:
            self.owned[shard] = Owned(Owner.decode(pair.value), pair.create_revision)
            self.free.pop(shard, None)

    def _delete(self, key: bytes, now: float, *, ended: bool) -> None:
        name = self._keys.replica_named(key)
        if name is not None:
            self.live.pop(name, None)
        shard = self._keys.shard_owned(key)
        if shard is not None and (owned := self.owned.pop(shard, None)) is not None:
            self.free[shard] = now
            self.before[shard] = PreviousOwner(owned.owner, ended)


# ---- Waiting until something that changes has changed as wanted.


class ChangeNotifier:
    """Tells whoever waits that something changed; each looks for itself at what.

    Attributes:
        count: How often there was news.
    """

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()
        self.count = 0

    def notify(self) -> None:
        """Have everybody look who waits."""
        self.count += 1
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    async def until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Return True as soon as a condition holds; False after `timeout` seconds without."""
        try:
            async with asyncio.timeout(timeout):
                while not holds():
                    await self._next()
        except TimeoutError:
            return holds()
        return True

    async def since(self, seen: int, timeout: float | None) -> None:
        """Return when there has been news after the `seen`-th, or after `timeout` seconds."""
        await self.until(lambda: self.count > seen, timeout)

    async def _next(self) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(waiting)
        try:
            await waiting
        finally:
            self._waiting.discard(waiting)
