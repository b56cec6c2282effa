"""Where things are under a prefix of etcd."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one prefix. Everything of ours is below it, so that several services can share one etcd."""

    prefix: str
    """As in `/rallypoint`, without a slash at its end."""

    @property
    def layout(self) -> bytes:
        """Of the layout: how many shards there are."""
        return f"{self.prefix}/layout".encode()

    def replica(self, name: str) -> bytes:
        """Of a replica's registration."""
        return self._replicas + name.encode()

    def owner(self, shard: int) -> bytes:
        """Of the owner of a shard: its create_revision is the shard's fencing token."""
        return self._owners + f"{shard:04x}".encode()

    def space(self, shard: int) -> bytes:
        """Prefix of the data of a shard."""
        return f"{self.prefix}/shards/{shard:04x}/".encode()

    @property
    def watched(self) -> tuple[bytes, bytes]:
        """The first key, and the one after the last, of all owners and registrations.

        They are neighbours in the order of keys, and nothing else is between them: one watch tells of both, in the
        order in which they changed.
        """
        return self._owners, self._replicas[:-1] + b"0"  # what comes after the slash

    @property
    def _owners(self) -> bytes:
        return f"{self.prefix}/owners/".encode()

    @property
    def _replicas(self) -> bytes:
        return f"{self.prefix}/replicas/".encode()

    def shard_owned(self, key: bytes) -> int | None:
        """The shard whose owner key this is; None: it is no such key."""
        number = key.removeprefix(self._owners)
        if number == key or len(number) != 4:
            return None
        try:
            return int(number, 16)
        except ValueError:
            return None

    def replica_named(self, key: bytes) -> str | None:
        """The replica whose registration this is; None: it is no such key."""
        name = key.removeprefix(self._replicas)
        return None if name == key else name.decode(errors="replace")
