"""How a prefix of etcd is divided: written once, by whoever comes first, and the same for ever."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from rallypoint.etcd.values import CreateRevision, Get, Put, Txn
from rallypoint.rendezvous.replicas.keys import Keys
from rallypoint.rpc.endpoint import SettingError

if TYPE_CHECKING:
    from rallypoint.etcd.client import EtcdClient

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
