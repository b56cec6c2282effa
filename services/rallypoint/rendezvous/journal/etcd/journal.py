"""The journal on etcd: owned by one replica at a time, each commit fenced; group commit."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence

from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.errors import EtcdError
from rallypoint.etcd.session import Session
from rallypoint.journal.v1.etcd_pb2 import EtcdHead
from rallypoint.rendezvous.base.cooperative import CooperativeRunner
from rallypoint.rendezvous.journal.etcd.commit import (
    CLEAR_STAGING,
    CommitStep,
    Cost,
    Packing,
    SpaceContents,
    cost,
    finish,
    plan,
)
from rallypoint.rendezvous.journal.etcd.fence import Fence, unusable
from rallypoint.rendezvous.journal.etcd.keys import JournalLocation, Owner
from rallypoint.rendezvous.journal.etcd.pool import CommitPool
from rallypoint.rendezvous.journal.etcd.reading import VERSION, interpret, read_pairs
from rallypoint.rendezvous.journal.journal import Entry, JournalError, OwnershipLost, Recovered
from rallypoint.rpc.pace import Pace

# Seconds that closing waits for the commit in flight. After that its callers get an error: the outcome is unknown.
_FLUSH = 5.0
# Seconds after which a commit is watched: from then it ends with the session, even if etcd does not reply.
_UNWATCHED = 0.1


class EtcdJournal:
    """Stores entries in a space of etcd while its owner key is ours; `Fence` protects the writes.

    Entries that arrive during one commit make up the next. One commit is in flight at a time: each compares the state
    that the previous one left. Commits of several journals that share a pool go to etcd together.
    """

    def __init__(
        self,
        client: EtcdClient,
        session: Session,
        location: JournalLocation,
        owner: Owner,
        *,
        pool: CommitPool | None = None,
        pace: Pace | None = None,
        draw: Callable[[int], bytes] = secrets.token_bytes,
        runner: CooperativeRunner | None = None,
    ) -> None:
        """Own nothing yet.

        Args:
            client: Client of the etcd.
            session: The owner key is bound to its lease. If it is lost, so is the journal.
            location: The keys of the journal.
            owner: This process.
            pool: Sends the commits; all journals of a process share one. None: a new one.
            pace: Delays between attempts.
            draw: Returns so many random bytes.
            runner: Runs the parsing of read keys; all journals of a process share one. None: a new one.
        """
        self._client = client
        self._session = session
        self._location = location
        self._owner = owner
        self._fence = Fence(
            client, session, location, pool=pool or CommitPool(client), pace=pace or Pace(), draw=draw
        )
        self._runner = runner or CooperativeRunner()
        self._contents = SpaceContents()
        self._head = EtcdHead(version=VERSION)
        self._pending: deque[tuple[Sequence[Entry], asyncio.Future[None]]] = deque()
        self._group: list[asyncio.Future[None]] = []
        self._committing: asyncio.Task[None] | None = None
        self._losing: asyncio.Task[None] | None = None
        self._broken: JournalError | None = None
        self._closing = False

    @property
    def fence(self) -> int:
        """The fencing token: create_revision of our owner key; 0: it isn't ours."""
        return self._fence.revision

    async def open(self) -> Recovered:
        """Claim the journal and read it; see `Journal.open`.

        Raises:
            OwnedElsewhere: Another process has it.
            JournalError: It is damaged, of a newer version, or etcd refuses; it is released again.
        """
        try:
            await self._fence.claim(self._owner)
            # Read after the claim: a commit of a previous owner is in it, or will never take effect.
            prefix = self._location.space
            pairs = await read_pairs(self._client, prefix)
            space = await self._runner.carry_out(interpret(prefix, pairs))
            self._contents, self._head = space.contents, space.head
            self._fence.head_revision = space.head_revision
            if space.unfinished:
                for step in finish(space.unfinished, space.head.staged_parts):
                    await self._write(step)
            elif space.abandoned:
                await self._write(CommitStep([CLEAR_STAGING]))
            self._fence.check()
        except EtcdError as error:
            await self._give_up()
            raise unusable("read", self._location, error) from error
        except JournalError as error:
            self._broken = error
            if not isinstance(error, OwnershipLost):
                await self._give_up()
            raise
        return space.recovered

    async def append(self, entries: Sequence[Entry]) -> None:
        """Commit entries, together with those of concurrent calls; see `Journal.append`.

        Raises:
            OwnershipLost: Another process owns the journal, or could: publish and return nothing more of it.
            JournalError: etcd refuses.
        """
        if self._broken is not None:
            raise self._broken
        if self._closing:
            raise self._closed()
        durable = asyncio.get_running_loop().create_future()
        self._pending.append((entries, durable))
        if self._committing is None:
            self._committing = asyncio.create_task(self._work())
        await durable

    async def close(self) -> None:
        """Commit pending entries, then release the journal to other processes. Bounded; never raises.

        A journal that is not certainly ours any more is left as it is.
        """
        self._closing = True
        if self._committing is not None:
            await asyncio.wait([self._committing], timeout=_FLUSH)
        await self._give_up()

    def _closed(self) -> JournalError:
        return JournalError(f"the journal in etcd under {self._location} is closed")

    async def _give_up(self) -> None:
        self._break(self._closed())
        if self._committing is not None:
            self._committing.cancel()
            await asyncio.wait([self._committing])
        if not isinstance(self._broken, OwnershipLost):
            await self._fence.release()

    def _break(self, error: JournalError) -> None:
        """Accept no more entries; the first error counts. All waiting callers get it."""
        self._broken = self._broken or error
        waiting = [*self._group, *(durable for _, durable in self._pending)]
        self._group = []
        self._pending.clear()
        for durable in waiting:
            if not durable.done():
                durable.set_exception(self._broken)

    async def _work(self) -> None:
        """Commit until nothing is pending, or the session is lost."""
        work = asyncio.current_task()
        assert work is not None
        # Most commits take a millisecond or two; a watching task for each would be a tenth of their cost.
        watching = asyncio.get_running_loop().call_later(_UNWATCHED, self._watch, work)
        try:
            while self._pending:
                await self._commit(self._take())
        except JournalError as error:
            self._break(error)
        except Exception as error:
            # A bug of ours; waiting callers must get an error too.
            self._break(JournalError(f"can't write the journal in etcd under {self._location}: {error!r}"))
            raise
        finally:
            watching.cancel()
            if self._losing is not None:
                self._losing.cancel()
                self._losing = None
            self._committing = None

    def _watch(self, work: asyncio.Task[None]) -> None:
        self._losing = asyncio.create_task(self._lose(work))

    async def _lose(self, work: asyncio.Task[None]) -> None:
        """Fail the waiting callers once the session is lost, since etcd may never reply."""
        await self._session.lost()
        try:
            self._fence.check()
        except OwnershipLost as error:
            self._break(error)
        work.cancel()

    def _take(self) -> list[Sequence[Entry]]:
        """Take the calls that go together: at least one, and more while they fit into a transaction."""
        calls: list[Sequence[Entry]] = []
        total = Cost(0, 0)
        while self._pending:
            total += cost(self._pending[0][0])
            if calls and not total.fits:
                break
            entries, durable = self._pending.popleft()
            calls.append(entries)
            self._group.append(durable)
        return calls

    async def _commit(self, calls: Sequence[Sequence[Entry]]) -> None:
        committed = False
        for step in self._plan(calls):
            if step.durable and not committed:
                committed = True
                self._head.number += 1
                self._head.packs = self._contents.pack_count
                self._head.checkpoints = len(self._contents.checkpoints)
            await self._write(step)
            if committed:
                self._settle()

    def _plan(self, calls: Sequence[Sequence[Entry]]) -> list[CommitStep]:
        try:
            packing = Packing(self._contents)
            for entries in calls:
                for entry in entries:
                    packing.add(entry)
            return plan(packing.changes())
        except ValueError as error:  # out of sequence, or text that has no encoding
            raise JournalError(f"can't write the journal in etcd under {self._location}: {error}") from error

    async def _write(self, step: CommitStep) -> None:
        self._head.staged_parts = step.staged_parts
        await self._fence.write(step.changes, self._head)

    def _settle(self) -> None:
        group, self._group = self._group, []
        for durable in group:
            if not durable.done():
                durable.set_result(None)
