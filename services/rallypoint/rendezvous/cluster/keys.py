"""Where things are under a prefix of etcd."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rallypoint.etcd.values import CreateRevision, Get, Put, Txn
from rallypoint.rpc.endpoint import Endpoint, EndpointError, SettingError, parse_endpoint

if TYPE_CHECKING:
    from rallypoint.etcd.client import EtcdClient


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


# ---- How a prefix of etcd is divided: written once, by whoever comes first, and the same for ever.


# Of what is under a prefix. Raised when an older replica could no longer read it, or be read.
VERSION = 1

DEFAULT_SHARDS = 64
"""Enough that a few replicas share runs evenly, and few enough that taking over a dead one's takes no time: each shard
costs a few KB, a read when it is claimed, and a commit of its own."""

MOST_SHARDS = 4_096


async def agreed_shards(client: EtcdClient, keys: Keys, wanted: int | None) -> int:
    """How many shards a prefix has. The first to ask decides; whoever comes later is told.

    Args:
        client: Of the etcd.
        keys: Of the prefix.
        wanted: How many there should be; None: as many as there are, or the default for a new prefix.

    Raises:
        SettingError: There is another number of them, or the prefix is of a newer version; one line.
        EtcdError: etcd did not answer, or refused.
    """
    ours = json.dumps({"version": VERSION, "shards": wanted or DEFAULT_SHARDS}).encode()
    # Sent twice, it finds what it wrote: an attempt of which no answer came does no harm.
    answer = await client.transact(
        Txn([CreateRevision(keys.layout, 0)], [Put(keys.layout, ours)], [Get(keys.layout)])
    )
    written = ours if answer.succeeded else answer.found[0][0].value
    shards = _read(written, keys)
    if wanted is not None and wanted != shards:
        raise SettingError(
            f"{keys.prefix} in etcd is of a service that has {shards} shards, not {wanted}: use another prefix, or the "
            "number that it has"
        )
    return shards


def _read(content: bytes, keys: Keys) -> int:
    try:
        fields = json.loads(content)
        version, shards = int(fields["version"]), int(fields["shards"])
    except (ValueError, KeyError, TypeError):
        raise SettingError(
            f"{keys.layout.decode()} in etcd holds {content[:80]!r}, which is no layout of ours: use another prefix"
        ) from None
    if version > VERSION:
        raise SettingError(
            f"{keys.prefix} in etcd is of version {version}, and this replica knows {VERSION}: start a newer one"
        )
    if not 1 <= shards <= MOST_SHARDS:
        raise SettingError(
            f"{keys.layout.decode()} in etcd says {shards} shards, expected 1 to {MOST_SHARDS}: use another prefix"
        )
    return shards


# ---- What a replica is called, and where others reach it.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SHARDS = re.compile(r"(?:^|&)shards=([^&]*)")


def split_shards(url: str) -> tuple[str, int | None]:
    """The URL of an etcd cluster without `shards=N` in its query, and that number; None: it names none.

    Raises:
        SettingError: It is no number of shards that there could be.
    """
    place, mark, query = url.partition("?")
    found = _SHARDS.findall(query)
    if not found:
        return url, None
    number = found[0]
    if len(found) > 1 or not (number.isascii() and number.isdigit() and 1 <= int(number) <= MOST_SHARDS):
        raise SettingError(f"--journal: shards={number!r}, expected one number from 1 to {MOST_SHARDS}")
    rest = _SHARDS.sub("", query).removeprefix("&")
    return place + (mark + rest if rest else ""), int(number)


def advertised_address(advertise: str, listening: str) -> str:
    """Where clients reach this replica.

    Args:
        advertise: What `--advertise` says; empty: where it listens, or by this machine's name if it listens at all
            of its addresses.
        listening: Where it listens, as `host:port` or `unix:/path`.

    Raises:
        SettingError: Nobody else could reach it there; one line.
    """
    if advertise:
        try:
            place = parse_endpoint(advertise)
        except EndpointError as error:
            raise SettingError(f"--advertise: {error}") from None
        if place.path is not None or _everywhere(place):
            raise SettingError(
                f"--advertise {advertise} is no address that others could connect to: give the host:port at which "
                "clients reach this machine"
            )
        return str(place)
    place = parse_endpoint(listening)
    if place.path is not None:
        raise SettingError(
            f"--host {listening} can't be reached from other machines: give --advertise HOST:PORT, or listen on TCP"
        )
    return str(Endpoint(socket.gethostname(), place.port)) if _everywhere(place) else str(place)


def _everywhere(place: Endpoint) -> bool:
    return place.host in ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)


def replica_name(name: str, address: str) -> str:
    """What a replica is called: `name`, or after its host and port.

    Raises:
        SettingError: That is no name.
    """
    if not name:
        port = parse_endpoint(address).port
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname()).lstrip('.-_') or 'replica'}-{port}"
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"--replica-name {name!r} is no name: expected up to 128 letters, digits, dots, dashes, colons and "
            "underscores, as in rendezvous-0"
        )
    return name
