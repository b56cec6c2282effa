"""The layout of a prefix of etcd."""

from __future__ import annotations

import json
import re
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rallypoint.etcd.values import CreateRevision, Get, Put, Txn
from rallypoint.rpc.endpoint import Endpoint, EndpointError, SettingError, parse_endpoint
from rallypoint.rpc.text import whole_number

if TYPE_CHECKING:
    from rallypoint.etcd.client import EtcdClient


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one prefix. All keys of a service are below it, so that several services can share one etcd."""

    prefix: str
    """For example `/rallypoint`, without a slash at its end."""

    @property
    def layout(self) -> bytes:
        """The key of the layout: the number of shards."""
        return f"{self.prefix}/layout".encode()

    def replica(self, name: str) -> bytes:
        """Return the key of a replica's registration."""
        return self._replicas + name.encode()

    def owner(self, shard: int) -> bytes:
        """Return the key of a shard's owner: its create_revision is the shard's fencing token."""
        return self._owners + f"{shard:04x}".encode()

    def space(self, shard: int) -> bytes:
        """Return the prefix of a shard's data."""
        return f"{self.prefix}/shards/{shard:04x}/".encode()

    @property
    def watched(self) -> tuple[bytes, bytes]:
        """The range of all owners and registrations: first key, and the key after the last.

        The two are neighbours in the order of keys, with nothing else between them: one watch reports both, in the
        order in which they changed.
        """
        return self._owners, self._replicas[:-1] + b"0"  # the character after the slash

    @property
    def _owners(self) -> bytes:
        return f"{self.prefix}/owners/".encode()

    @property
    def _replicas(self) -> bytes:
        return f"{self.prefix}/replicas/".encode()

    def shard_owned(self, key: bytes) -> int | None:
        """Return the shard of an owner key; None: it is another key."""
        number = key.removeprefix(self._owners)
        if number == key or len(number) != 4:
            return None
        try:
            return int(number, 16)
        except ValueError:
            return None

    def replica_named(self, key: bytes) -> str | None:
        """Return the name of the replica of a registration key; None: it is another key."""
        name = key.removeprefix(self._replicas)
        return None if name == key else name.decode(errors="replace")


# ---- The layout of a prefix of etcd: written once, by the first replica, and never changed.


# Version of the data under a prefix. Increased when an older replica could not read it, or could not be read.
VERSION = 1

DEFAULT_SHARDS = 64
"""Enough that a few replicas share runs evenly, and few enough that a dead replica's are taken over at once: each shard
costs a few KB, a read when it is claimed, and a commit of its own."""

MOST_SHARDS = 4_096


async def agreed_shards(client: EtcdClient, keys: Keys, wanted: int | None) -> int:
    """Return the number of shards of a prefix. The first caller decides it; later callers get that number.

    Args:
        wanted: The expected number; None: the present number, or the default for a new prefix.

    Raises:
        SettingError: The number differs, or the prefix is of a newer version; one line.
        EtcdError: etcd did not reply, or refused.
    """
    ours = json.dumps({"version": VERSION, "shards": wanted or DEFAULT_SHARDS}).encode()
    # A repeated attempt finds the value it wrote: a lost reply does no harm.
    answer = await client.transact(
        Txn([CreateRevision(keys.layout, 0)], [Put(keys.layout, ours)], [Get(keys.layout)])
    )
    written = ours if answer.succeeded else answer.found[0][0].value
    shards = _read(written, keys)
    if wanted is not None and wanted != shards:
        raise SettingError(
            f"{keys.prefix} in etcd has {shards} shards, not {wanted}: use another prefix, or shards={shards}"
        )
    return shards


def _read(content: bytes, keys: Keys) -> int:
    try:
        fields = json.loads(content)
        version, shards = int(fields["version"]), int(fields["shards"])
    except (ValueError, KeyError, TypeError):
        raise SettingError(
            f"{keys.layout.decode()} in etcd holds {content[:80]!r}, not a layout of Rallypoint: use another prefix"
        ) from None
    if version > VERSION:
        raise SettingError(
            f"{keys.prefix} in etcd is of version {version}, but this replica knows {VERSION}: start a newer one"
        )
    if not 1 <= shards <= MOST_SHARDS:
        raise SettingError(
            f"{keys.layout.decode()} in etcd has {shards} shards, expected 1 to {MOST_SHARDS}: use another prefix"
        )
    return shards


# ---- Name and address of a replica.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_SHARDS = re.compile(r"(?:^|&)shards=([^&]*)")


def split_shards(url: str) -> tuple[str, int | None]:
    """Return the URL of an etcd cluster without `shards=N` in its query, and that number; None: no number.

    Raises:
        SettingError: It is not a possible number of shards.
    """
    address, mark, query = url.partition("?")
    found = _SHARDS.findall(query)
    if not found:
        return url, None
    number = whole_number(found[0], 1, MOST_SHARDS)
    if len(found) > 1 or number is None:
        raise SettingError(f"--journal: shards={found[0]!r}, expected one number from 1 to {MOST_SHARDS}")
    rest = _SHARDS.sub("", query).removeprefix("&")
    return address + (mark + rest if rest else ""), number


def advertised_address(advertise: str, listening: str) -> str:
    """Return the address at which clients reach this replica.

    Args:
        advertise: Value of `--advertise`; empty: the listening address, with this machine's name if that is a wildcard
            address.
        listening: The listening address, as `host:port` or `unix:/path`.

    Raises:
        SettingError: Other hosts can't connect to it; one line.
    """
    if advertise:
        try:
            endpoint = parse_endpoint(advertise)
        except EndpointError as error:
            raise SettingError(f"--advertise: {error}") from None
        if endpoint.path is not None or _is_wildcard(endpoint):
            raise SettingError(
                f"--advertise {advertise} is not an address that other hosts can connect to: give the host:port at "
                "which clients reach this machine"
            )
        return str(endpoint)
    endpoint = parse_endpoint(listening)
    if endpoint.path is not None:
        raise SettingError(
            f"--host {listening} can't be reached from other machines: give --advertise HOST:PORT, or listen on TCP"
        )
    return str(Endpoint(socket.gethostname(), endpoint.port)) if _is_wildcard(endpoint) else str(endpoint)


def _is_wildcard(endpoint: Endpoint) -> bool:
    return endpoint.host in ("0.0.0.0", "::")  # noqa: S104 (compared, not bound)


def replica_name(name: str, address: str) -> str:
    """Return the checked `name`, or if it is empty, one made of host and port; raise SettingError if not valid."""
    if not name:
        port = parse_endpoint(address).port
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname()).lstrip('.-_') or 'replica'}-{port}"
    if not _NAME.fullmatch(name):
        raise SettingError(
            f"--replica-name {name!r} is not valid: expected up to 128 letters, digits, dots, dashes, colons and "
            "underscores, as in rendezvous-0"
        )
    return name
