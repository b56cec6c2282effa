"""The store of one run: writes in batches, one batch at a time; nothing is published before it is durable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from rallypoint.rendezvous.base.entries import StoreChange, StoreJournal, WriteAdmission
from rallypoint.rendezvous.base.errors import Refusal, RunBroken
from rallypoint.rendezvous.base.limits import Quota, SharedTotals, StoreLimits
from rallypoint.rendezvous.base.refusals import StoreBusy
from rallypoint.rendezvous.core.commands import LeaseLost, NodeIsEvicted, Refused, RoundOver, RunNotFound
from rallypoint.rendezvous.journal.commit_loop import CheckOwned, CommitLoop, PendingRequest
from rallypoint.rendezvous.journal.journal import OwnershipLost
from rallypoint.rendezvous.store.core import Room, RunDraft, RunSpaces
from rallypoint.rendezvous.store.waits import Waits
from rallypoint.rendezvous.store.writes import Write, decide
from rallypoint.rpc.logs import get_logger

# ---- Obsolete entries that a journal still keeps: deleted step by step, and never an entry in use.


class StoreSweep:
    """Deletions that must become durable at some time."""

    def __init__(self) -> None:
        self._deletions: deque[Iterator[StoreChange]] = deque()

    def __bool__(self) -> bool:
        return bool(self._deletions)

    def add(self, deletions: Iterable[StoreChange]) -> None:
        """Add deletions; they are checked when they are taken out."""
        iterator = iter(deletions)
        if (first := next(iterator, None)) is not None:
            self._deletions.append(chain((first,), iterator))

    def take(self, count: int, lives: Callable[[int, str], bool]) -> list[StoreChange]:
        """Remove the next `count` deletions; return those of entries that are not in use, by round and key.

        An obsolete entry may have been set again since: a forgotten run may come again under its name.
        """
        taken: list[StoreChange] = []
        while self._deletions and len(taken) < count:
            part = list(islice(self._deletions[0], count - len(taken)))
            if not part:
                self._deletions.popleft()
            taken += part
        return [deletion for deletion in taken if not lives(deletion.round, deletion.key)]

    def take_all(self) -> Iterator[StoreChange]:
        """Remove all deletions; they are checked later, one by one."""
        deletions, self._deletions = self._deletions, deque()
        return chain.from_iterable(deletions)


T = TypeVar("T")

_log = get_logger("rallypoint.rendezvous.store")

# Deletions go to the journal in portions of this size, so that they do not delay writes, also of other runs. 250 take a
# few milliseconds, so a round of a million keys is gone after about ten seconds.
_SWEEP = 250
# Seconds until a retry after STORE_BUSY: about the time of a few commits on a slow disk.
_BUSY_RETRY = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingWrite(PendingRequest[T]):
    """A write that waits for its commit."""

    write: Write[T]


class RunStore(CommitLoop[_PendingWrite[Any]]):
    """The store of one run.

    At most one batch is being committed; writes that arrive meanwhile wait for the next, or, beyond the limits of a
    batch, for a later one. Batches of several runs share the journal's commits, one batch of each.

    A forgotten run starts again with empty spaces. It may come again under its name while a batch of its old life is
    still being committed: the batch is not applied to the new spaces, its entries are deleted from the journal, and a
    new batch begins only after it. So no entry of the old life is read again, and no deletion of one reaches an entry
    of the new life.
    """

    def __init__(
        self,
        spaces: RunSpaces,
        *,
        journal: StoreJournal,
        admission: WriteAdmission,
        check_owned: CheckOwned,
        limits: StoreLimits,
        totals: SharedTotals,
        on_journal_failure: Callable[[Exception], None],
    ) -> None:
        """Serve `spaces`; the other arguments are those of StoreService."""
        super().__init__(journal, check_owned)
        self.spaces = spaces
        self.waits = Waits(spaces.run_id, limits)
        self._admission = admission
        self._limits = limits
        self._bytes = Quota(totals.store_bytes)
        self._by_client = totals.store_bytes_by_client
        self._client = ""
        self._count_bytes()
        self._on_journal_failure = on_journal_failure
        self._sweep = StoreSweep()
        # Entries of a forgotten run. The journal drops them by itself; the memory is released step by step.
        self._released: Iterator[object] = iter(())
        self._releasing = False
        self._committing: asyncio.Task[None] | None = None
        # Type of the unexpected error that stopped the store, if any.
        self._broken = ""

    @property
    def committing(self) -> asyncio.Task[None] | None:
        """The committing task; it ends when nothing is left to write. None: there is nothing to write."""
        return self._committing

    def current_round(self) -> int:
        """Return the only round whose workers may write, as durable; 0 before the first. Raise RunNotFound if none."""
        return self._known(self._admission.writable_round(self.spaces.run_id))

    def _known(self, round: int | None) -> int:
        if round is None:
            raise RunNotFound(self.spaces.run_id)
        return round

    async def write(self, write: Write[T]) -> T:
        """Carry a write out; return its result when it is durable. See StoreService.write."""
        # Checked again when the write is decided; here, so that a hopeless write doesn't wait for a commit. Rounds are
        # checked only then: the write may repeat one that is being committed.
        self._check_writer(write)
        queued, size = self._waiting_bytes.own, write.queued_bytes
        if queued and queued + size > self._limits.queued_bytes:
            raise StoreBusy(self.spaces.run_id, queued, _BUSY_RETRY)
        pending = _PendingWrite(run_id=self.spaces.run_id, queued_bytes=size, write=write)
        self._put(pending)
        self._start_committing()
        return await pending.reply

    def forget_rounds_before(self, round: int) -> None:
        """Drop all rounds before `round`, from the journal too; end the waits in them."""
        self.sweep(self.spaces.forget_rounds_before(round))
        self._count_bytes()
        for old in self.waits.rounds:
            if 0 < old < round:
                self.waits.end([old], partial(RoundOver, self.spaces.run_id, old, round))

    def forget(self) -> None:
        """Drop everything except the journal's entries; refuse the waiting requests."""
        run_id = self.spaces.run_id
        self._released = chain(self._released, self._sweep.take_all(), self.spaces.forget())
        self._releasing = True
        self.spaces = RunSpaces(run_id)
        self._count_bytes()
        self._broken = ""
        self._refuse_all(RunNotFound)
        self._start_committing()

    @property
    def is_empty(self) -> bool:
        """True if there are no entries, neither here nor in the journal, and none is being committed."""
        return self._committing is None and not self._sweep and self.spaces.is_empty

    async def clear(self, refusal: Refusal) -> None:
        """Delete all entries of a closed run; return when that is durable. Requests that wait are refused."""
        self._refuse_all(refusal)
        while not self.is_empty and not self._retired:
            # A batch that was decided before the end of the run may be in flight, and adds its entries here.
            self.sweep(self.spaces.forget())
            self._count_bytes()
            if self._committing is not None:
                await asyncio.wait({self._committing})

    def _count_bytes(self, used: int | None = None) -> None:
        more = (self.spaces.used_bytes if used is None else used) - self._bytes.own
        self._bytes.add(more)
        self._by_client.add(self._client, more)

    def _rooms(self) -> Sequence[Room]:
        """Return the bounds that the run shares with others, now that it may have a new life, and another client."""
        client = self._admission.creator_of(self.spaces.run_id)
        if client != self._client:
            self._by_client.add(self._client, -self._bytes.own)
            self._by_client.add(client, self._bytes.own)
            self._client = client
        rooms = [Room(self._limits.all_bytes, self._bytes.others)]
        if client:
            others = self._by_client.used(client) - self._bytes.own
            rooms.append(Room(self._limits.client_bytes, others, client))
        return rooms

    def release(self) -> None:
        """Count its bytes no longer: another process owns the run, or will."""
        self._count_bytes(0)

    def check_whole(self) -> None:
        """Raise RunBroken if an unexpected error has stopped the store."""
        if self._broken:
            raise RunBroken(self.spaces.run_id, self._broken)

    def stop(self, refusal: RunBroken) -> None:
        """Refuse waiting and later requests for good: the state in memory may differ from the durable one."""
        self._broken = refusal.cause
        self._refuse_all(lambda run_id: RunBroken(run_id, refusal.cause))

    def retire(self, refusal: Refusal) -> None:
        """Refuse waiting requests; the batch in flight is the last. The next owner makes the remaining deletions."""
        super().retire(refusal)
        self._end_waits(refusal)

    def _refuse_all(self, refusal: Refusal) -> None:
        self._refuse_waiting(refusal)
        self._end_waits(refusal)

    def _end_waits(self, refusal: Refusal) -> None:
        self.waits.end(self.waits.rounds, partial(refusal, self.spaces.run_id))

    def sweep(self, deletions: Iterable[StoreChange]) -> None:
        """Delete entries from the journal that are in no space any more."""
        self._sweep.add(deletions)
        if self._sweep:
            self._start_committing()

    def _check_writer(self, write: Write[Any]) -> None:
        run_id, writer = self.spaces.run_id, write.writer
        try:
            self._admission.check_lease(run_id, writer.node_id, writer.lease, writer.token)
        except NodeIsEvicted as refusal:
            # A writer need not know why the lease of its node has ended.
            cause = f"an operator took the node out ({refusal.reason})"
            raise LeaseLost(run_id, writer.node_id, writer.lease, None, cause) from refusal

    def _start_committing(self) -> None:
        if self._committing is None and not self._retired:
            self._committing = asyncio.get_running_loop().create_task(self._commit_waiting())

    async def _commit_waiting(self) -> None:
        try:
            await self.serve(until_idle=True)
        except Exception as error:
            if not isinstance(error, OwnershipLost):
                _log.error("store.journal_failed", run_id=self.spaces.run_id, error=str(error))
            self._on_journal_failure(error)
        finally:
            self._committing = None

    def has_work(self) -> bool:
        """Return True if entries are left to delete or to release."""
        return bool(self._sweep) or self._releasing

    def commit(self, requests: Iterator[_PendingWrite[Any]]) -> Iterator[Sequence[StoreChange]]:
        """Decide a batch of writes; a portion of the deletions becomes durable with it. See `CommitLoop`."""
        self._releasing = sum(1 for _ in islice(self._released, _SWEEP)) > 0
        limits, taken_bytes = self._limits, 0
        draft = RunDraft(self.spaces, limits, self._rooms())
        decided: list[tuple[_PendingWrite[Any], object]] = []
        try:
            while (
                max(len(decided), draft.changed_entries) < limits.batch_entries
                and max(taken_bytes, draft.changed_bytes) < limits.batch_bytes
                and (pending := next(requests, None)) is not None
            ):
                # Skip a write whose caller is gone: its outcome is unknown to the caller anyway.
                if not pending.reply.done():
                    taken_bytes += pending.queued_bytes
                    decided.append((pending, self._decide(draft, pending.write)))
            entries = draft.values()
            records = draft.records()
            # Counted before it is durable, so that other runs do not take the same room meanwhile.
            self._count_bytes(draft.used_bytes)
            # First, so that keys that the batch sets again remain in the end.
            swept = self._sweep.take(_SWEEP, self.spaces.holds)
            yield [*swept, *entries, *records]
            # The batch is durable. No await until all are settled: no reader sees half of it.
            forgotten = self._take_over(draft, entries, records)
            for pending, outcome in decided:
                pending.settle(forgotten or outcome)
        except Exception as error:
            # A bug of ours, in this run: other runs go on.
            run_id, cause = self.spaces.run_id, type(error).__name__
            _log.exception("store.run_stopped", error=error, run_id=run_id)
            self._refuse(self._under_way, lambda run_id: RunBroken(run_id, cause))
            self.stop(RunBroken(run_id, cause))

    def _decide(self, draft: RunDraft, write: Write[Any]) -> object:
        """Return the write's result, or the refusal."""
        try:
            # By the latest facts, durable or not. A write can't be decided while its round lasts and become durable
            # after the round's end: the write is appended in this very step of the event loop, the fact that ends the
            # round in the step of its own decision, and a journal makes entries durable in the order of appending. So a
            # write that was decided first is durable, and answered, no later than the end of its round; a write that is
            # decided after that fact is refused, even if the fact is still in flight.
            latest_round = self._known(self._admission.latest_round(self.spaces.run_id))
            self._check_writer(write)
            return decide(draft, write, latest_round)
        except Refused as refusal:
            return refusal

    def _take_over(
        self, draft: RunDraft, entries: Sequence[StoreChange], records: Sequence[StoreChange]
    ) -> RunNotFound | None:
        """Apply durable changes and notify the waiting requests, in the order of the writes."""
        forgotten = draft.run is not self.spaces
        if not forgotten:
            for step in draft.steps():
                for change in step:
                    self.spaces.apply(change)
                self.waits.settle(self.spaces, step)
            for record in records:
                self.spaces.apply(record)
        self._count_bytes()
        # Entries of rounds that ended during the commit: the journal mustn't keep them. Records outlive their round.
        oldest = self.spaces.oldest_round
        over = chain(
            entries if forgotten else (entry for entry in entries if 0 < entry.round < oldest),
            records if forgotten else (),
        )
        self._sweep.add(replace(entry, value=None) for entry in over if entry.value is not None)
        return RunNotFound(self.spaces.run_id) if forgotten else None
