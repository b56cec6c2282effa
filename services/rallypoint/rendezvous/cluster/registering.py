"""Register the name of a replica, and withdraw it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdError
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, Delete, Get, ModRevision, Put, Txn
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.cluster.view import ReplicaRegistration
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger

_log = get_logger(__name__)

# Longest time that etcd takes to end an expired lease, seconds.
_ENDING = 5.0
# Seconds; a process that sees a deadline this much too late was paused.
_LATE = 1.0


class NameTaken(EtcdError):
    """Another process has registered under our name."""


async def wait_for_name(client: EtcdClient, keys: Keys, name: str, registration: ReplicaRegistration) -> None:
    """Return when no other process is registered under a name: a dead one's registration expires with its lease.

    Raises:
        SettingError: Another replica of this name is alive; one line.
        EtcdError: etcd did not reply, or refused.
    """
    key = keys.replica(name)
    waited_for: tuple[str, int] | None = None
    while True:
        snapshot = await client.get(key)
        if not snapshot.pairs:
            return
        there = ReplicaRegistration.decode(snapshot.pairs[0].value) or ReplicaRegistration(
            "an unknown address", "", 0.0, 0.0
        )
        if there.instance == registration.instance:
            return
        # A leader elected meanwhile gives the lease of a dead replica its full time again.
        found = (there.instance, await client.term())
        if found == waited_for:
            raise SettingError(
                f"--replica-name: a replica {name!r} is alive already, at {there.address}: stop that one, or give "
                "this one another name"
            )
        if waited_for is None:
            _log.info("waiting for another replica of this name to end", name=name, address=there.address)
        waited_for = found if await _outlasted(client, key, snapshot.revision, there) else None


async def _outlasted(client: EtcdClient, key: bytes, revision: int, there: ReplicaRegistration) -> bool:
    """Return True if a registration outlived the longest lease of a dead replica; False once it is deleted."""
    now = asyncio.get_running_loop().time
    deadline = now() + there.lease_ttl + _ENDING
    try:
        async with asyncio.timeout_at(deadline):
            await _until_deleted(client, key, revision)
        return False
    except TimeoutError:
        # If this process was paused, the events of that time are still unread.
        return now() < deadline + _LATE


async def _until_deleted(client: EtcdClient, key: bytes, revision: int) -> None:
    async with aclosing(client.watch(key, b"", revision + 1)) as watching:
        async for changes in watching:
            if any(change.deleted for change in changes):
                return


async def register(
    client: EtcdClient, session: Session, keys: Keys, name: str, registration: ReplicaRegistration
) -> None:
    """Register as a live replica, for the time of the session's lease.

    Raises:
        NameTaken: Another process was quicker.
        EtcdError: etcd did not reply, or refused.
    """
    key = keys.replica(name)
    ours = Put(key, registration.encode(), session.lease)
    answer = await client.transact(Txn([CreateRevision(key, 0)], [ours], [Get(key)]))
    while not answer.succeeded:
        (found,) = answer.found[0] or (None,)
        there = ReplicaRegistration.decode(found.value) if found is not None else None
        if found is not None and (there is None or there.instance != registration.instance):
            raise NameTaken(f"another replica has registered as {name!r}")
        # Our own: from an earlier session, or an attempt in this one whose reply was lost. Or deleted by now.
        condition = ModRevision(key, found.mod_revision) if found is not None else CreateRevision(key, 0)
        answer = await client.transact(Txn([condition], [ours], [Get(key)]))


async def withdraw(client: EtcdClient, keys: Keys, name: str, registration: ReplicaRegistration) -> None:
    """Delete the registration.

    Raises:
        EtcdError: It is unknown if it was deleted; it expires with the session's lease in any case.
    """
    key = keys.replica(name)
    snapshot = await client.get(key)
    for pair in snapshot.pairs:
        there = ReplicaRegistration.decode(pair.value)
        if there is not None and there.instance == registration.instance:
            await client.transact(Txn([ModRevision(key, pair.mod_revision)], [Delete(key)]))
