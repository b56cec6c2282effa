"""A location for a journal on a real etcd, and a client of it whose requests and responses can be lost or late."""

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
    """The fate of a transaction."""

    ANSWERED = auto()
    ANSWER_LOST = auto()  # etcd applies it, and the response is lost
    REQUEST_LOST = auto()  # the request is lost
    LAST = auto()  # etcd applies it, and at that moment the sender is killed
    NEVER = auto()  # the sender is killed before it sends it


class Killed(asyncio.CancelledError):
    """The sender of a transaction was killed."""


class LossyClient(EtcdClient):
    """A client that gives every transaction a fate.

    Attributes:
        sent: All transactions, in order.
        fate: The fate of the n-th from now, from 0 on.
        killed: Set once a sender was killed.
        hold: Responses wait for it, if there is one.
        done: Set once etcd has applied a transaction whose response is held.
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
        """Set the fates of later transactions; drop the list of sent ones."""
        self.fate, self._count, self.sent = fate, 0, []

    async def transact(self, txn: Txn) -> TxnResult:
        """As the client's, but subject to the fate."""
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
    """One location, and the actions of a test on it."""

    def __init__(self, client: LossyClient, session: Session) -> None:
        name = secrets.token_hex(8)
        self.client = client
        self.session = session
        self.place = JournalLocation(f"/{name}/owners/0000".encode(), f"/{name}/shards/0000/".encode())

    @property
    def deletion_of_owner(self) -> Txn:
        """The transaction that deletes the owner key."""
        return Txn([], [Delete(self.place.owner_key)])

    def beside(self) -> EtcdShelf:
        """Return another location on the same etcd, with the same client and session."""
        return EtcdShelf(self.client, self.session)

    def journal(
        self,
        name: str = "a",
        session: Session | None = None,
        *,
        pool: CommitPool | None = None,
        pace: Pace | None = None,
    ) -> EtcdJournal:
        """Return a journal in this location, of an owner with a name; not opened yet."""
        owner = Owner(name, f"{name}:29400", f"instance of {name}")
        pace = pace or Pace(draw=lambda: 0.0)
        return EtcdJournal(self.client, session or self.session, self.place, owner, pool=pool, pace=pace)

    async def take_over(self, name: str = "b", *, pool: CommitPool | None = None) -> EtcdJournal:
        """Become the owner, as after the end of the one before: its owner key is gone, and it does not know that."""
        await EtcdClient.transact(self.client, self.deletion_of_owner)
        journal = self.journal(name, pool=pool)
        await journal.open()
        return journal

    async def read(self) -> JournalSpace:
        """Return the journal's contents, as another replica reads them."""
        return finish(interpret(self.place.space, await read_pairs(self.client, self.place.space)))

    async def snapshot(self) -> dict[bytes, tuple[bytes, int]]:
        """Return all keys of the journal with their values and the revisions that wrote them."""
        found = await self.client.get(self.place.space, prefix_end(self.place.space))
        return {pair.key: (pair.value, pair.mod_revision) for pair in found.pairs}

    async def keys(self) -> list[str]:
        """Return all keys of the journal, without the prefix of its space."""
        found = await self.client.get(self.place.space, prefix_end(self.place.space), keys_only=True)
        return [pair.key.removeprefix(self.place.space).decode() for pair in found.pairs]

    async def put(self, key: str, value: bytes) -> None:
        """Put a key in the space without being its owner, which is forbidden."""
        await EtcdClient.transact(self.client, Txn([], [Put(self.place.space + key.encode(), value)]))

    async def delete(self, key: str) -> None:
        """Delete a key there without being its owner, which is forbidden."""
        await EtcdClient.transact(self.client, Txn([], [Delete(self.place.space + key.encode())]))

    async def owner(self) -> Owner | None:
        """Return the owner of the journal."""
        found = await self.client.get(self.place.owner_key)
        return Owner.decode(found.pairs[0].value) if found.pairs else None


def has_fence(txn: Txn, fence: int) -> bool:
    """Return True if a transaction is one of the owner with a fencing token."""
    return any(isinstance(each, CreateRevision) and each.equals == fence for each in txn.when)


@asynccontextmanager
async def etcd_shelf(url: str) -> AsyncIterator[EtcdShelf]:
    """Open a new location, on the etcd of a URL."""
    client = LossyClient(url)
    async with client:
        session = await Session.open(client, TTL)
        try:
            yield EtcdShelf(client, session)
        finally:
            await session.close()
