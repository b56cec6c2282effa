"""A place for a journal on a real etcd, and a client of it whose requests and answers can be lost, or come late."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum, auto

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.errors import EtcdUnavailable
from rallypoint.etcd.session import Session
from rallypoint.etcd.values import CreateRevision, Delete, Put, Txn, TxnResult, prefix_end
from rallypoint.rendezvous.base.cooperative import finish
from rallypoint.rendezvous.journal.etcd.journal import EtcdJournal
from rallypoint.rendezvous.journal.etcd.keys import JournalLocation, Owner
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.etcd.reading import JournalSpace, interpret, read_pairs
from rallypoint.rpc.pace import Pace

TTL = 60.0
"""Seconds that a session lives without a keep-alive: longer than any machine stalls."""


class Fate(Enum):
    """What becomes of a transaction."""

    ANSWERED = auto()
    ANSWER_LOST = auto()  # it is done, and nobody hears of it
    REQUEST_LOST = auto()  # it is not done, and nobody hears of it
    LAST = auto()  # it is done, and at that moment whoever sent it is killed
    NEVER = auto()  # before it is sent, whoever would send it is killed


class Killed(asyncio.CancelledError):
    """Whoever sent a transaction does nothing any more."""


class LossyClient(EtcdClient):
    """A client of which every transaction has a fate.

    Attributes:
        sent: All transactions, in order.
        fate: What becomes of the n-th from now, from 0 on.
        killed: Whether somebody was.
        hold: Answers wait for it, if there is one.
        done: Whether a transaction whose answer is held was done.
    """

    def __init__(self, url: str) -> None:
        super().__init__(parse_address(url, {}))
        self.sent: list[Txn] = []
        self.fate: Callable[[int], Fate] = lambda n: Fate.ANSWERED
        self.killed = asyncio.Event()
        self.hold: asyncio.Event | None = None
        self.done = asyncio.Event()
        self._count = 0

    def from_now(self, fate: Callable[[int], Fate]) -> None:
        """Decide on the fates of what is sent from now on."""
        self.fate, self._count, self.sent = fate, 0, []

    async def transact(self, txn: Txn) -> TxnResult:
        """As the client's, but for what becomes of it."""
        fate = self.fate(self._count)
        self._count += 1
        self.sent.append(txn)
        if fate is Fate.NEVER:
            self.killed.set()
            raise Killed
        if fate is Fate.REQUEST_LOST:
            raise EtcdUnavailable("lost")
        result = await super().transact(txn)
        if self.hold is not None:
            self.done.set()
            await self.hold.wait()
        if fate is Fate.ANSWER_LOST:
            raise EtcdUnavailable("lost")
        if fate is Fate.LAST:
            self.killed.set()
            raise Killed
        return result


class EtcdShelf:
    """One place, and what happens there."""

    def __init__(self, client: LossyClient, session: Session) -> None:
        name = secrets.token_hex(8)
        self.client = client
        self.session = session
        self.place = JournalLocation(f"/{name}/owners/0000".encode(), f"/{name}/shards/0000/".encode())

    @property
    def deletion_of_owner(self) -> Txn:
        """The end of whoever owns the journal."""
        return Txn([], [Delete(self.place.owner_key)])

    def beside(self) -> EtcdShelf:
        """Another place on the same etcd, of the same client and session."""
        return EtcdShelf(self.client, self.session)

    def journal(
        self,
        name: str = "a",
        session: Session | None = None,
        *,
        pool: CommitPool | None = None,
        pace: Pace | None = None,
    ) -> EtcdJournal:
        """A journal in this place, of an owner with a name; not opened yet."""
        owner = Owner(name, f"{name}:29400", f"instance of {name}")
        pace = pace or Pace(draw=lambda: 0.0)
        return EtcdJournal(self.client, session or self.session, self.place, owner, pool=pool, pace=pace)

    async def take_over(self, name: str = "b", *, pool: CommitPool | None = None) -> EtcdJournal:
        """Become the owner, as after the end of the one before: its owner key is gone, and it knows nothing of that."""
        await EtcdClient.transact(self.client, self.deletion_of_owner)
        journal = self.journal(name, pool=pool)
        await journal.open()
        return journal

    async def read(self) -> JournalSpace:
        """What is there, as another replica reads it."""
        return finish(interpret(self.place.space, await read_pairs(self.client, self.place.space)))

    async def snapshot(self) -> dict[bytes, tuple[bytes, int]]:
        """All keys of the journal and their values, and when they were written."""
        found = await self.client.get(self.place.space, prefix_end(self.place.space))
        return {pair.key: (pair.value, pair.mod_revision) for pair in found.pairs}

    async def keys(self) -> list[str]:
        """All keys of the journal, without the prefix of its space."""
        found = await self.client.get(self.place.space, prefix_end(self.place.space), keys_only=True)
        return [pair.key.removeprefix(self.place.space).decode() for pair in found.pairs]

    async def put(self, key: str, value: bytes) -> None:
        """Put something in the space, as nobody may."""
        await EtcdClient.transact(self.client, Txn([], [Put(self.place.space + key.encode(), value)]))

    async def delete(self, key: str) -> None:
        """Delete something there, as nobody may."""
        await EtcdClient.transact(self.client, Txn([], [Delete(self.place.space + key.encode())]))

    async def owner(self) -> Owner | None:
        """Who owns the journal."""
        found = await self.client.get(self.place.owner_key)
        return Owner.decode(found.pairs[0].value) if found.pairs else None


def has_fence(txn: Txn, fence: int) -> bool:
    """Whether a transaction is one of the owner with a fencing token."""
    return any(isinstance(each, CreateRevision) and each.equals == fence for each in txn.when)


@asynccontextmanager
async def etcd_shelf(url: str) -> AsyncIterator[EtcdShelf]:
    """A place that nobody used before, on the etcd of a URL."""
    client = LossyClient(url)
    async with client:
        session = await Session.open(client, TTL)
        try:
            yield EtcdShelf(client, session)
        finally:
            await session.close()
