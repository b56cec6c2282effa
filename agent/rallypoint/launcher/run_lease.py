"""The lease with which all that a run has in etcd dies: nothing of a job stays there for ever, however it ends.

Its high-water mark dies last, with a lease of its own: the run may go on where the other lease has ended, because its
agents could not reach etcd meanwhile.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
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
from rallypoint.rendezvous.journal.etcd.journal import Owner
from rallypoint.rendezvous.journal.etcd.keys import HIGH_WATER
from rallypoint.rendezvous.shard.reader import RunReader
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace

RUN_TTL = 7200
"""Seconds that what a run has in etcd outlives the last agent that served it; torch's. Until then agents that come late
hear that the run is over, and no new job can have its name. Shorter forgets a run whose hosts are all away for a while
(power, etcd itself); longer leaves more in etcd."""

NUMBERS_TTL = 365 * 24 * 3600
"""Seconds that a run's high-water mark outlives its last owner. Agents that were cut off from etcd for longer than
RUN_TTL come back to it: no round, token or budget goes back then. Shorter than workers may run without etcd, and they
would; longer keeps some hundred bytes of each run in etcd for longer."""

_EVERY = 6
"""Renewals of the lease in its time: an outage of etcd may last for what is left of that."""

_AGAIN = 10.0
"""Seconds until a renewal without an answer is tried again: there is time."""


def on_lease(txn: Txn, lease: int, lasting: bytes = b"", lasting_lease: int = 0) -> Txn:
    """The transaction, with its puts on a lease, but for those that have one.

    Args:
        txn: The transaction.
        lease: The lease.
        lasting: What keys begin with whose puts get `lasting_lease`; empty: none.
        lasting_lease: A lease that outlives the other one.
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
    """A client whose keys die with the lease of their run, those aside that are put with another one.

    The run's high-water mark has a lease of its own, of `NUMBERS_TTL`. It is granted with the first mark, and found by
    its key afterwards.
    """

    def __init__(self, address: EtcdAddress, lease: int, *, pace: Pace) -> None:
        """As of EtcdClient; `lease`: the run's."""
        super().__init__(address, pace=pace)
        self.lease = lease
        self._marks = Keys(address.prefix).space(0) + HIGH_WATER
        self._lasting_lease = 0

    async def transact(self, txn: Txn, *, timeout: float | None = None) -> TxnResult:
        """As of EtcdClient."""
        if not self._lasting_lease and any(_begins(each.key, self._marks) for each in txn.then):
            self._lasting_lease = await self._have_lasting_lease()
        leased = on_lease(txn, self.lease, self._marks, self._lasting_lease)
        try:
            return await super().transact(leased, timeout=timeout)
        except EtcdRefused as error:
            if error.reason is Reason.LEASE_NOT_FOUND:
                self._lasting_lease = 0  # it may be this one: the next owner gets another
            raise

    async def _have_lasting_lease(self) -> int:
        """The lease of the run's high-water mark, prolonged; a new one where there is none."""
        for pair in (await self.get(self._marks, prefix_end(self._marks), keys_only=True)).pairs:
            if pair.lease and await self.keep_alive(pair.lease) > 0:
                return pair.lease
        # One of which the answer is lost has no key, and ends unused.
        lease, _ = await self.grant(NUMBERS_TTL)
        return lease


async def run_lease(client: EtcdClient, run_id: str, ttl: int = RUN_TTL) -> int:
    """The lease that a run has; one that has none is given one.

    Args:
        client: Of the etcd; its address names the prefix of the run.
        run_id: The run's name, for people who look into etcd.
        ttl: Seconds that the lease of a new run outlives the last renewal.

    Raises:
        EtcdError: etcd did not answer, or refused. Asking again does no harm.
        SettingError: Something else has the run's place in etcd; one line.
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
            # It has just ended, and takes this key with it, and all others of the run.
            await _until_changed(client, key, found.revision)
        lease, _ = await client.grant(ttl)
        # If no answer comes, whoever asks again finds this lease, or another one: then this one dies unused.
        if (await client.transact(Txn([CreateRevision(key, 0)], [Put(key, name, lease)]))).succeeded:
            return lease
        await client.revoke(lease)


async def _until_changed(client: EtcdClient, key: bytes, revision: int) -> None:
    async with aclosing(client.watch(key, b"", revision + 1)) as watching:
        await anext(watching)


async def forgotten(client: EtcdClient, lease: int, pace: Pace) -> None:
    """Return once a run is not on this lease any more: somebody ended it, or deleted the run. For whoever serves it.

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
            continue  # it may have changed: to be read anew
        except EtcdUnavailable:
            await pace.sleep(pace.draw() * _AGAIN)


async def keep_alive(client: EtcdClient, lease: int, pace: Pace) -> None:
    """Renew a run's lease, again and again: for whoever serves the run. Returns once it has ended.

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


# ---- Which agents of a job serve its rendezvous: as many as there are seats, each a key of etcd on its holder's
# lease.


SEATS = 3
"""Agents that serve a run at a time: one owns it, the others are ready to. With three, two can be lost at one moment
and the run is taken over; more cost etcd a lease each, and make no job safer than an etcd of three members."""

SEAT_TTL = 10.0
"""Seconds after which the seat of a host that vanished is free; that of torch's keep-alives."""

# Seconds over which those who wait for a seat spread their attempts at it: with a thousand of them, all but the first
# few see that it is taken without asking for it.
_SPREAD = 1.0


@asynccontextmanager
async def seat(client: EtcdClient, holder: str, pace: Pace | None = None) -> AsyncIterator[Session]:
    """Wait for a seat, and have it for as long as the context lasts, or until the session is lost.

    Args:
        client: Of the etcd; its address names the prefix of the run.
        holder: Who takes it, for people.
        pace: How time passes.

    Raises:
        EtcdError: etcd did not answer, or refused. Nothing is held.
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
    """Seats that nobody has, as soon as there are any."""
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
    """Whether one of these was free still."""
    for key in free:
        put = Put(key, holding.value, holding.lease)
        if (await client.transact(Txn([CreateRevision(key, 0)], [put]))).succeeded:
            return True
    return False


# ---- Where a run is served just now, for a client in the same process: a home of no runs that always knows the way.
#
# Seats change hands as hosts come and go. A client that was given their addresses at the start would have a list
# of dead
# hosts in the end; this one is told by etcd.


_log = get_logger("rallypoint.run")

# Seconds between two attempts at reading who owns the run, at the most.
_LONGEST_BACKOFF = 1.0


class RedirectingLocator:
    """A Home that refuses everything with the address of whoever owns the run.

    Attributes:
        owner: Where it is served; None: nowhere, or not known yet.
    """

    def __init__(self) -> None:
        """Know nothing yet."""
        self.owner: str | None = None
        self._known = asyncio.Event()

    async def served(self) -> None:
        """Wait until the run is served anywhere, for the first time."""
        await self._known.wait()

    def list_replicas(self, run_id: str) -> NoReturn:
        """Raises NotOwner."""
        self._refuse(run_id)

    def shard(self, run_id: str) -> Shard:
        """Raises NotOwner."""
        self._refuse(run_id)

    def writer(self, run_id: str) -> Shard:
        """Raises NotOwner."""
        self._refuse(run_id)

    async def reader(self, run_id: str) -> RunReader:
        """Raises NotOwner."""
        self._refuse(run_id)

    async def readers(self) -> Sequence[RunReader]:
        """Raises NotOwner."""
        self._refuse("")

    def shards(self) -> Sequence[Shard]:
        """None."""
        return []

    async def follow(self, client: EtcdClient, pace: Pace | None = None) -> None:
        """Keep up to date with etcd until cancelled. What was known last stands while there is no etcd.

        Args:
            client: Of the etcd; its address names the prefix of the run, which has one shard.
            pace: How time passes.
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
                _log.debug("who serves the run can't be read from etcd", error=str(error))
            await pace.sleep(backoff.next())

    def _take(self, pairs: Sequence[KeyValue]) -> None:
        self.owner = next((Owner.decode(pair.value).address for pair in pairs), None)
        if self.owner is not None:
            self._known.set()

    def _refuse(self, run_id: str) -> NoReturn:
        raise NotOwner(run_id, self.owner)
