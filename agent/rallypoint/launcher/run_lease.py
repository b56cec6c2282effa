"""The lease of a run in etcd: all keys of the run end with it, so that no job leaves keys for ever, however it ends.

The run's high-water mark has a longer lease of its own: the run may continue after the first lease has ended, because
its agents could not reach etcd meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import NoReturn

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import EtcdAddress
from rallypoint.etcd.errors import Compacted, EtcdError, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, KeyValue, Operation, Put, Txn, TxnResult, prefix_end
from rallypoint.rendezvous.base.errors import NotOwner
from rallypoint.rendezvous.cluster.keys import Keys
from rallypoint.rendezvous.journal.etcd.keys import HIGH_WATER, Owner
from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.endpoint import RunSecret, SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace

RUN_TTL = 7200
"""Seconds that the keys of a run outlive the last agent that served it; torch's value. Until then late agents learn
that the run is over, and no new job can have its name. Shorter: a run is forgotten if all its hosts are away for a
while (power, etcd itself); longer: more keys stay in etcd."""

NUMBERS_TTL = 365 * 24 * 3600
"""Seconds that a run's high-water mark outlives its last owner, so that no round, token or budget goes back when agents
return that were cut off from etcd for longer than RUN_TTL. It must not be shorter than workers may run without etcd;
longer keeps some hundred bytes of each run in etcd for longer."""

_EVERY = 6
"""Renewals of the lease in its time: etcd may be away for the rest of the time."""

_AGAIN = 10.0
"""Seconds until a renewal without a reply is tried again: there is time."""


def on_lease(txn: Txn, lease: int, lasting: bytes = b"", lasting_lease: int = 0) -> Txn:
    """Return the transaction with its puts on a lease, except puts that have one already.

    Args:
        lasting: Prefix of the keys whose puts get `lasting_lease`; empty: none.
    """

    def leased(operations: Sequence[Operation]) -> list[Operation]:
        return [
            dataclasses.replace(each, lease=lasting_lease if _begins(each.key, lasting) else lease)
            if isinstance(each, Put) and not each.lease
            else each
            for each in operations
        ]

    return Txn(txn.when, leased(txn.then), leased(txn.otherwise))


def _begins(key: bytes, prefix: bytes) -> bool:
    return bool(prefix) and key.startswith(prefix)


class LeasedClient(EtcdClient):
    """A client whose keys end with the lease of their run, except puts that name another lease.

    The run's high-water mark has a lease of its own, of `NUMBERS_TTL`. It is granted with the first mark, and found by
    its key afterwards.
    """

    def __init__(self, address: EtcdAddress, lease: int, *, pace: Pace) -> None:
        """As EtcdClient; `lease`: the run's."""
        super().__init__(address, pace=pace)
        self.lease = lease
        self._marks = Keys(address.prefix).space(0) + HIGH_WATER
        self._lasting_lease = 0

    async def transact(self, txn: Txn) -> TxnResult:
        """As EtcdClient."""
        if not self._lasting_lease and any(_begins(each.key, self._marks) for each in txn.then):
            self._lasting_lease = await self._have_lasting_lease()
        leased = on_lease(txn, self.lease, self._marks, self._lasting_lease)
        try:
            return await super().transact(leased)
        except EtcdRefused as error:
            if error.reason is Reason.LEASE_NOT_FOUND:
                self._lasting_lease = 0  # the missing lease may be this one: the next owner gets another
            raise

    async def _have_lasting_lease(self) -> int:
        """Renew and return the lease of the run's high-water mark; grant one if there is none."""
        for pair in (await self.get(self._marks, prefix_end(self._marks), keys_only=True)).pairs:
            if pair.lease and await self.keep_alive(pair.lease) > 0:
                return pair.lease
        # If the reply is lost, this lease has no key, and ends unused.
        lease, _ = await self.grant(NUMBERS_TTL)
        return lease


async def run_lease(client: EtcdClient, run_id: str, ttl: int = RUN_TTL) -> int:
    """Return the lease of a run; a run without one gets a new lease.

    Args:
        client: Client of the etcd; its address has the prefix of the run.
        run_id: Name of the run, for people who look into etcd.
        ttl: Seconds that the lease of a new run outlives its last renewal.

    Raises:
        EtcdError: etcd did not reply, or refused. A repetition does no harm.
        SettingError: The run's key belongs to another program; one line.
    """
    key = f"{client.address.prefix}/run".encode()
    name = json.dumps({"version": 1, "run_id": run_id}).encode()
    while True:
        found = await client.get(key)
        for pair in found.pairs:
            if not pair.lease:
                raise SettingError(
                    f"{key.decode()} in etcd is not ours: choose another --rdzv-id, or etcd_prefix in --rdzv-conf"
                )
            if await client.keep_alive(pair.lease) > 0:
                return pair.lease
            # The lease has just ended, and removes this key and all others of the run.
            await _until_changed(client, key, found.revision)
        lease, _ = await client.grant(ttl)
        # If no reply comes, the next attempt finds this lease or another one; then this one ends unused.
        if (await client.transact(Txn([CreateRevision(key, 0)], [Put(key, name, lease)]))).succeeded:
            return lease
        await client.revoke(lease)


async def _until_changed(client: EtcdClient, key: bytes, revision: int) -> None:
    async with aclosing(client.watch(key, b"", revision + 1)) as watching:
        await anext(watching)


async def shared_secret(client: EtcdClient) -> RunSecret:
    """Return the secret that the agents of a run share, which the first of them makes: who may use the run's keys in
    etcd may use its services too.

    It outlives the run's lease, as the agents do that are cut off from etcd meanwhile.

    Args:
        client: Client of the etcd; its address has the prefix of the run.

    Raises:
        EtcdError: etcd did not reply, or refused. A repetition does no harm.
    """
    key = f"{client.address.prefix}/secret".encode()
    while True:
        for pair in (await client.get(key)).pairs:
            if not pair.lease or await client.keep_alive(pair.lease) > 0:
                return RunSecret(pair.value.decode())
        lease, _ = await client.grant(NUMBERS_TTL)
        new = secrets.token_hex(32)
        if (await client.transact(Txn([CreateRevision(key, 0)], [Put(key, new.encode(), lease)]))).succeeded:
            return RunSecret(new)
        await client.revoke(lease)


async def forgotten(client: EtcdClient, lease: int, pace: Pace) -> None:
    """Return once a run has left this lease: it was ended or deleted. For the agents that serve the run.

    Raises:
        EtcdRefused: etcd refuses.
    """
    key = f"{client.address.prefix}/run".encode()
    while True:
        try:
            found = await client.get(key)
            if all(pair.lease != lease for pair in found.pairs):
                return
            await _until_changed(client, key, found.revision)
        except Compacted:
            continue  # the key may have changed: read it again
        except EtcdUnavailable:
            await pace.sleep(pace.draw() * _AGAIN)


async def keep_alive(client: EtcdClient, lease: int, pace: Pace) -> None:
    """Renew a run's lease until it has ended. For the agents that serve the run.

    Raises:
        EtcdRefused: etcd refuses.
    """
    while True:
        try:
            left = await client.keep_alive(lease)
        except EtcdUnavailable:
            left = _EVERY * _AGAIN
        if left <= 0:
            return
        await pace.sleep(left / _EVERY)


# ---- The agents of a job that serve its rendezvous: each holds a seat, a key of etcd on its lease.


SEATS = 3
"""Agents that serve a run at a time: one owns it, the others are ready to take over. With three, two can be lost at one
moment; more cost etcd a lease each, and make no job safer than an etcd of three members."""

SEAT_TTL = 10.0
"""Seconds after which the seat of a lost host is free; that of torch's keep-alives."""

# Seconds over which waiting agents spread their attempts to take a free seat: of a thousand, all but the first few see
# that it is taken without a request for it.
_SPREAD = 1.0


@asynccontextmanager
async def seat(client: EtcdClient, holder: str, pace: Pace | None = None) -> AsyncIterator[Session]:
    """Wait for a seat, and hold it as long as the context lasts, or until the session is lost.

    Args:
        client: Client of the etcd; its address has the prefix of the run.
        holder: Name of the holder, for people.

    Raises:
        EtcdError: etcd did not reply, or refused. No seat is held.
    """
    pace = pace or Pace()
    prefix = f"{client.address.prefix}/seats/".encode()
    while True:
        free = await _free_slots(client, prefix, pace)
        session = await Session.open(client, SEAT_TTL, pace=pace)
        try:
            if await _sit(client, free, Put(b"", holder.encode(), session.lease)):
                yield session
                return
        finally:
            await session.close()


async def _free_slots(client: EtcdClient, prefix: bytes, pace: Pace) -> Sequence[bytes]:
    """Wait until a seat is free, and return the keys of all free ones."""
    end = prefix_end(prefix)
    while True:
        found = await client.get(prefix, end, keys_only=True)
        taken = {pair.key for pair in found.pairs}
        if free := [key for number in range(SEATS) if (key := prefix + str(number).encode()) not in taken]:
            return free
        async with aclosing(client.watch(prefix, end, found.revision + 1)) as watching:
            async for changes in watching:
                if any(change.deleted for change in changes):
                    break
        await pace.sleep(pace.draw() * _SPREAD)


async def _sit(client: EtcdClient, free: Sequence[bytes], holding: Put) -> bool:
    """Take the first key that is still free; return False if none is."""
    for key in free:
        put = Put(key, holding.value, holding.lease)
        if (await client.transact(Txn([CreateRevision(key, 0)], [put]))).succeeded:
            return True
    return False


# ---- The owner of the run, for a client in the same process: a locator without runs that redirects to the owner.
#
# Owners change. A client with the addresses from its start would end with a list of lost hosts; this
# locator gets them from etcd.


_log = get_logger("rallypoint.run")

# Longest pause in seconds between two attempts to read the owner.
_LONGEST_BACKOFF = 1.0


class RedirectingLocator:
    """A RunLocator that refuses every call, with the address of the run's owner.

    Attributes:
        owner: Address of the owner; None: none, or not known yet.
    """

    def __init__(self) -> None:
        """Start without a known owner."""
        self.owner: str | None = None
        self._known = asyncio.Event()

    async def served(self) -> None:
        """Wait until the run has an owner for the first time."""
        await self._known.wait()

    def list_replicas(self, run_id: str) -> NoReturn:
        """Raise NotOwner."""
        self._refuse(run_id)

    def shard(self, run_id: str) -> Shard:
        """Raise NotOwner."""
        self._refuse(run_id)

    def writer(self, run_id: str) -> Shard:
        """Raise NotOwner."""
        self._refuse(run_id)

    async def reader(self, run_id: str) -> RunReader:
        """Raise NotOwner."""
        self._refuse(run_id)

    async def readers(self) -> Sequence[RunReader]:
        """Raise NotOwner."""
        self._refuse("")

    def shards(self) -> Sequence[Shard]:
        """Return an empty sequence: this process has no shards here."""
        return []

    async def follow(self, client: EtcdClient, pace: Pace | None = None) -> None:
        """Follow the owner in etcd until cancelled. While etcd is unreachable, the last known owner stays.

        Args:
            client: Client of the etcd; its address has the prefix of the run, which has one shard.
        """
        pace = pace or Pace()
        key = Keys(client.address.prefix).owner(0)
        backoff = pace.backoff(_LONGEST_BACKOFF)
        while True:
            try:
                found = await client.get(key)
                self._take(found.pairs)
                backoff.reset()
                async with aclosing(client.watch(key, b"", found.revision + 1)) as watching:
                    async for changes in watching:
                        last = changes[-1]
                        self._take([] if last.deleted else [last.pair])
            except EtcdError as error:
                _log.debug("the run's owner can't be read from etcd", error=str(error))
            await pace.sleep(backoff.next())

    def _take(self, pairs: Sequence[KeyValue]) -> None:
        self.owner = next((Owner.decode(pair.value).address for pair in pairs), None)
        if self.owner is not None:
            self._known.set()

    def _refuse(self, run_id: str) -> NoReturn:
        raise NotOwner(run_id, self.owner)
