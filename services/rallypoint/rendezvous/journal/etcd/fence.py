"""Writes to a space of etcd, possible only for its present owner."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import REMEDIES, EtcdError, EtcdRefused, EtcdUnavailable, Reason
from rallypoint.etcd.session import Session, SessionLost
from rallypoint.etcd.values import CreateRevision, Delete, Get, ModRevision, Put, Txn, TxnResult
from rallypoint.journal.v1.etcd_pb2 import EtcdHead
from rallypoint.rendezvous.journal.etcd.commit import Change
from rallypoint.rendezvous.journal.etcd.keys import HEAD, JournalLocation, OwnedElsewhere, Owner
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace

_log = get_logger(__name__)

_ID_BYTES = 16
# Seconds for deleting the owner key. If that fails, the key expires with its lease, or the lease's owner revokes it.
_RELEASE = 2.0


class Fence:
    """The right of one owner to write to one space, from its claim to its release.

    The proofs below are about writes. A copy of a write is an etcd transaction that has all its comparisons and all its
    changes, alone or merged with writes to other spaces (`CommitPool`): it does everything in it or nothing.

    Why no other owner's state can be overwritten. Every copy compares the create_revision of the owner key, which no
    two claims share, with that of our claim: once the key is deleted, by the end of its lease or by any client, no copy
    does anything, however late it arrives and however it is merged.

    Why a write can be sent again, alone or merged with others than before. Every copy writes the head, and compares
    that the head was not written since our last write. So of all copies of one write at most one does anything, and
    none does once a later write has. A merged copy that comes late therefore does nothing, neither for us nor for its
    other members, if any of its members was done by another copy; if none was, all of it is done, once, and each member
    finds that out as if only its own reply had been lost. For if the comparison fails, the head shows if a copy of this
    write has been done: then it holds the write's id.
    """

    def __init__(
        self,
        client: EtcdClient,
        session: Session,
        location: JournalLocation,
        *,
        pool: CommitPool,
        pace: Pace,
        draw: Callable[[int], bytes],
    ) -> None:
        """Own nothing yet. `pool`: sends the writes, merged with those of other journals."""
        self._client = client
        self._pool = pool
        self._session = session
        self._location = location
        self._pace = pace
        self._draw = draw
        self.revision = 0
        """The fencing token; 0: nothing was claimed."""
        self.head_revision = 0
        """Mod_revision of the head after our last transaction, or as it was read."""

    async def claim(self, owner: Owner) -> None:
        """Become the owner, if there is none.

        Raises:
            OwnedElsewhere: There is an owner.
            JournalError: etcd refuses.
            OwnershipLost: The session is lost.
        """
        # With an id of its own: otherwise a key left by another claim of ours would let copies of that claim's
        # transactions pass.
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
        """Do changes in one transaction; return when they are durable and we are certainly the owner.

        Args:
            changes: Keys are without the prefix of the space.
            head: The new head; its id is drawn here.

        Raises:
            OwnershipLost: We are not the owner any more; the changes may be durable.
            JournalError: etcd refuses, or the session is lost; the changes may be durable.
        """
        head.fence = self.revision
        head.id = self._draw(_ID_BYTES)
        location = self._location
        head_key = location.space + HEAD
        txn = Txn(
            [CreateRevision(location.owner_key, self.revision), ModRevision(head_key, self.head_revision)],
            [
                *(_within(location.space, change) for change in changes),
                Put(head_key, head.SerializeToString()),
            ],
            [Get(location.owner_key), Get(head_key)],
        )
        result = await self._until_answered("write", txn, self._pool.transact)
        if result.succeeded:
            self.head_revision = result.revision
        else:
            self.head_revision = self._revision_if_done(result, head.id)
        # It may have taken so long that another replica owns the journal now, and has already published later changes.
        self.check()

    def _revision_if_done(self, result: TxnResult, id_: bytes) -> int:
        """Return the revision of a transaction that an earlier copy did."""
        owners, heads = result.found
        if not owners or owners[0].create_revision != self.revision:
            raise OwnershipLost(f"another replica owns the journal in etcd under {self._location} now")
        if not heads or EtcdHead.FromString(heads[0].value).id != id_:
            raise OwnershipLost(
                f"the journal in etcd under {self._location} was written by a process that does not own it; only its "
                "owner may write there"
            )
        return heads[0].mod_revision

    def check(self) -> None:
        """Raise OwnershipLost unless our lease is certainly alive."""
        try:
            self._session.check()
        except SessionLost as error:
            raise OwnershipLost(f"lost the journal in etcd under {self._location}: {error}") from error

    async def release(self) -> None:
        """Delete the owner key, if it is still ours. Bounded; ignores errors of etcd. Nothing can be written after it.

        Safe while a transaction is in flight: every copy of it that arrives after the deletion does nothing.
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
            cause = str(error) or f"etcd did not reply within {_RELEASE:g} s"
            _log.info(
                "owner key not deleted; it expires with its lease", location=str(self._location), cause=cause
            )

    async def _until_answered(
        self, doing: str, txn: Txn, transact: Callable[[Txn], Awaitable[TxnResult]]
    ) -> TxnResult:
        """Send a transaction, of which at most one copy does anything, until etcd replies or the session is lost."""
        backoff = self._pace.backoff()
        while True:
            self.check()
            try:
                return await transact(txn)
            except EtcdUnavailable as error:
                _log.debug("resending a transaction", location=str(self._location), cause=str(error))
            except EtcdError as error:
                raise unusable(doing, self._location, error) from error
            await self._pace.sleep(backoff.next())


def unusable(doing: str, location: JournalLocation, error: EtcdError) -> JournalError:
    """Return the error of a journal that etcd does not let us claim, read or write."""
    if isinstance(error, EtcdRefused) and error.reason is Reason.LEASE_NOT_FOUND:
        return OwnershipLost(f"lost the journal in etcd under {location}: {error}")
    remedy = REMEDIES.get(error.reason) if isinstance(error, EtcdRefused) else None
    return JournalError(
        f"can't {doing} the journal in etcd under {location}: {' '.join(str(error).split())}"
        + (f"; {remedy}" if remedy else "")
    )


def _within(space: bytes, change: Change) -> Change:
    if isinstance(change, Put):
        return Put(space + change.key, change.value)
    return Delete(space + change.key, space + change.end if change.end else b"")
