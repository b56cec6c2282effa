"""Writing to a space of etcd as its owner, so that whoever is not, or no longer, can't."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import REMEDIES, EtcdError, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.session import Session, SessionLost
from rallypoint.etcd.values import CreateRevision, Delete, Get, ModRevision, Put, Txn, TxnResult
from rallypoint.rendezvous.journal.etcd.commit import Change
from rallypoint.rendezvous.journal.etcd.keys import HEAD, JournalLocation, OwnedElsewhere, Owner
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rallypoint.rendezvous.v1.etcd_journal_pb2 import EtcdHead
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace

_log = get_logger(__name__)

_ID_BYTES = 16
# Seconds for the farewell: an owner key that isn't deleted goes with its lease, or by the hand of who owns that.
_RELEASE = 2.0


class Fence:
    """The right of one owner to write to one space, from its claim to its release.

    What follows is said of writes. A copy of one is a transaction of etcd's that has all its comparisons and all its
    changes, alone or merged with writes to other spaces (`CommitPool`): it does all that is in it or nothing.

    Why no other owner's state can be overwritten. Every copy compares the create_revision of the owner key, which no
    two claims share, with that of our claim: once the key is deleted, by its lease's end or by anybody, no copy does
    anything, however late it arrives and whoever else is in it.

    Why sending again is safe, alone or with others than before. Every copy writes the head, and compares that nobody
    wrote it since our last write. So of all copies of one write at most one does anything, and none once a later write
    has. A merged copy that comes late therefore does nothing, neither for us nor for the others in it, if any of its
    members was done by another copy; if none was, all of it is done, once, and each of them finds that out as if its
    answer alone had been lost. For if the comparison fails, the head tells whether a copy of this write had done it:
    then it bears the write's id.
    """

    def __init__(
        self,
        client: EtcdClient,
        session: Session,
        place: JournalLocation,
        *,
        pool: CommitPool,
        pace: Pace,
        draw: Callable[[int], bytes],
    ) -> None:
        """Own nothing yet; `pool`: what is written goes through it, with what others write."""
        self._client = client
        self._pool = pool
        self._session = session
        self._location = place
        self._pace = pace
        self._draw = draw
        self.revision = 0
        """The fencing token; 0: nothing was claimed."""
        self.head_revision = 0
        """Mod_revision of the head after our last transaction, or as it was read."""

    async def claim(self, owner: Owner) -> None:
        """Become the owner, if there is none.

        Raises:
            OwnedElsewhere: There is.
            JournalError: etcd refuses.
            OwnershipLost: The session is lost.
        """
        # With an id of its own: a key that another claim of ours left behind would let copies of that one's
        # transactions in.
        mine = owner.encode(self._draw(_ID_BYTES).hex())
        key = self._location.owner_key
        txn = Txn([CreateRevision(key, 0)], [Put(key, mine, self._session.lease)], [Get(key)])
        result = await self._until_answered("claim", txn, self._client.transact)
        if result.succeeded:
            self.revision = result.revision
        else:
            (found,) = result.found[0]
            if found.value != mine:
                raise OwnedElsewhere(str(self._location), Owner.decode(found.value))
            self.revision = found.create_revision
        self.check()

    async def write(self, changes: Sequence[Change], head: EtcdHead) -> None:
        """Do changes in one transaction; returns when they are durable and we are the owner for certain.

        Args:
            changes: Keys are without the prefix of the space.
            head: What the head becomes; its id is drawn here.

        Raises:
            OwnershipLost: We are not the owner any more; the changes may be durable.
            JournalError: etcd refuses, or we can't ask it any more; the changes may be durable.
        """
        head.fence = self.revision
        head.id = self._draw(_ID_BYTES)
        place = self._location
        head_key = place.space + HEAD
        txn = Txn(
            [CreateRevision(place.owner_key, self.revision), ModRevision(head_key, self.head_revision)],
            [*(_within(place.space, change) for change in changes), Put(head_key, head.SerializeToString())],
            [Get(place.owner_key), Get(head_key)],
        )
        result = await self._until_answered("write", txn, self._pool.transact)
        if result.succeeded:
            self.head_revision = result.revision
        else:
            self.head_revision = self._revision_if_done(result, head.id)
        # It may have taken so long that the lease is another's by now, who may be telling already what came after.
        self.check()

    def _revision_if_done(self, result: TxnResult, id_: bytes) -> int:
        """The revision of a transaction of which an earlier copy was done."""
        owners, heads = result.found
        if not owners or owners[0].create_revision != self.revision:
            raise OwnershipLost(f"the journal in etcd under {self._location} is another replica's by now")
        if not heads or EtcdHead.FromString(heads[0].value).id != id_:
            raise OwnershipLost(
                f"the journal in etcd under {self._location} was written by somebody who does not own it; nobody else "
                "may write there"
            )
        return heads[0].mod_revision

    def check(self) -> None:
        """Raises OwnershipLost once the lease could be another's."""
        try:
            self._session.check()
        except SessionLost as error:
            raise OwnershipLost(
                f"the journal in etcd under {self._location} can't be kept: {error}"
            ) from error

    async def release(self) -> None:
        """Let another own it, if we still do. Bounded; never raises for etcd's sake. Nothing can be written after it.

        Also with a transaction on its way: of that, every copy that arrives after the deletion does nothing.
        """
        revision, self.revision = self.revision, 0
        if not revision or not self._session.held():
            return
        key = self._location.owner_key
        try:
            async with asyncio.timeout(_RELEASE):
                txn = Txn([CreateRevision(key, revision)], [Delete(key)])
                await self._until_answered("release", txn, self._client.transact)
        except (JournalError, TimeoutError) as error:
            cause = str(error) or f"etcd gave no answer for {_RELEASE:g} s"
            _log.info("an owner key was left to go with its lease", place=str(self._location), cause=cause)

    async def _until_answered(
        self, doing: str, txn: Txn, transact: Callable[[Txn], Awaitable[TxnResult]]
    ) -> TxnResult:
        """Send a transaction, of which one copy at most does anything, until etcd answers or the session is lost."""
        backoff = self._pace.backoff()
        while True:
            self.check()
            try:
                return await transact(txn)
            except EtcdUnavailable as error:
                _log.debug("a transaction is sent again", place=str(self._location), cause=str(error))
            except EtcdError as error:
                raise unusable(doing, self._location, error) from error
            await self._pace.sleep(backoff.next())


def unusable(doing: str, place: JournalLocation, error: EtcdError) -> JournalError:
    """The error of a journal that etcd won't let us claim, read or write."""
    if isinstance(error, EtcdRefused) and error.reason is Reason.LEASE_NOT_FOUND:
        return OwnershipLost(f"the journal in etcd under {place} can't be kept: {error}")
    remedy = REMEDIES.get(error.reason) if isinstance(error, EtcdRefused) else None
    return JournalError(
        f"can't {doing} the journal in etcd under {place}: {' '.join(str(error).split())}"
        + (f"; {remedy}" if remedy else "")
    )


def _within(space: bytes, change: Change) -> Change:
    if isinstance(change, Put):
        return Put(space + change.key, change.value)
    return Delete(space + change.key, space + change.end if change.end else b"")
