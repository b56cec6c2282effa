"""The live replicas and the owners of shards, as stored in etcd: kept up to date by one watch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from rallypoint.etcd.values import Change, KeyValue
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.keys import Owner

# ---- The registration of a replica, read by the others.


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """One live replica.

    Attributes:
        address: Its address for clients: host:port.
        instance: Random id of the process: distinguishes a replica from an earlier one of the same name.
        since: When the process began to serve, unix seconds; for people.
        lease_ttl: Seconds until it is gone from etcd if it dies.
    """

    address: str
    instance: str
    since: float
    lease_ttl: float

    def encode(self) -> bytes:
        """Encode as JSON."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, content: bytes) -> ReplicaRegistration | None:
        """Decode from JSON; None if it is not a registration. Fields of newer versions are ignored."""
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
    """The owner of a shard, and the create_revision of its key: the shard's fencing token."""

    owner: Owner
    fence: int


@dataclass(frozen=True, slots=True)
class PreviousOwner:
    """The last owner of a free shard; `ended`: its lease ended, so it has died or was cut off from etcd."""

    owner: Owner
    ended: bool


class Cluster:
    """Registrations and owner keys. It may be behind etcd, and is never ahead of it.

    Attributes:
        live: Registered replicas, by name.
        live_since: When their instances last changed, seconds of the clock of `now`.
        owned: Shards with an owner.
        free: The other ones, and since when this is known.
        before: Last owners of shards that became free; for people.
        shards: Number of shards.
    """

    def __init__(self, keys: Keys, shards: int) -> None:
        """Start empty: no live replica, and no shard known to be free."""
        self._keys = keys
        self.shards = shards
        self.live: dict[str, ReplicaRegistration] = {}
        self.live_since = float("-inf")
        self.owned: dict[int, Owned] = {}
        self.free: dict[int, float] = {}
        self.before: dict[int, PreviousOwner] = {}

    def read(self, pairs: Iterable[KeyValue], now: float) -> None:
        """Replace everything with a snapshot."""
        live, free = self.live, self.free
        self.live, self.owned = {}, {}
        for pair in pairs:
            self._put(pair)
        self.free = {shard: free.get(shard, now) for shard in range(self.shards) if shard not in self.owned}
        if self.live != live:
            self.live_since = now

    def apply(self, changes: Sequence[Change], now: float) -> None:
        """Apply changes."""
        live = dict(self.live)
        # Keys deleted with a lease go in one revision; a hand-over deletes the owner key and nothing else.
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
