"""The store of one run: writes in batches, one at a time, and nothing told before it is durable."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from rallypoint.rendezvous.base.cooperative import settle
from rallypoint.rendezvous.base.entries import CheckLease, StoreChange, StoreJournal
from rallypoint.rendezvous.base.errors import NotOwner, OutcomeUnknown, Refusal, RunBroken, of_unknown_outcome
from rallypoint.rendezvous.base.limits import StoreLimits
from rallypoint.rendezvous.base.ownership import CheckOwned
from rallypoint.rendezvous.base.refusals import JournalFailed, RoundOver, StoreBusy
from rallypoint.rendezvous.core.commands import LeaseLost, NodeIsEvicted, Refused, RunNotFound
from rallypoint.rendezvous.journal.journal import OwnershipLost
from rallypoint.rendezvous.store.core import RunDraft, RunSpaces
from rallypoint.rendezvous.store.waits import Waits
from rallypoint.rendezvous.store.writes import Write, decide
from rallypoint.rpc.logs import get_logger

# ---- Entries that nobody has any more and that a journal still keeps: they go bit by bit, and never one that lives.


class StoreSweep:
    """Deletions that are to be made durable some time."""

    def __init__(self) -> None:
        self._deletions: deque[Iterator[StoreChange]] = deque()

    def __bool__(self) -> bool:
        return bool(self._deletions)

    def add(self, deletions: Iterable[StoreChange]) -> None:
        """Take deletions in; they are looked at as they are taken out."""
        iterator = iter(deletions)
        if (first := next(iterator, None)) is not None:
            self._deletions.append(chain((first,), iterator))

    def take(self, count: int, lives: Callable[[int, str], bool]) -> list[StoreChange]:
        """Take the next `count` deletions out; return those of entries that don't live, by round and key.

        What was obsolete can have been set again since: a run that was forgotten may come again under its name.
        """
        taken: list[StoreChange] = []
        while self._deletions and len(taken) < count:
            part = list(islice(self._deletions[0], count - len(taken)))
            if not part:
                self._deletions.popleft()
            taken += part
        return [deletion for deletion in taken if not lives(deletion.round, deletion.key)]

    def take_all(self) -> Iterator[StoreChange]:
        """Take all deletions out, to be looked at as they come."""
        deletions, self._deletions = self._deletions, deque()
        return chain.from_iterable(deletions)


T = TypeVar("T")

_log = get_logger("rallypoint.rendezvous.store")

# Deletions of what is over go to the journal so many at a time: they must not hold up a write, of other runs
# neither. 250 take a few milliseconds, so a round of a million keys is gone after about ten seconds.
_SWEEP = 250
# When to come back after STORE_BUSY: about the time of a few commits on a slow disk. Seconds.
_BUSY_RETRY = 0.1


@dataclass(slots=True, eq=False)
class _PendingWrite:
    """A write that waits for its commit, and the bytes that it holds."""

    write: Write[Any]
    size: int
    reply: asyncio.Future[Any]


class RunStore:
    """The store of one run.

    At most one batch is being committed; what arrives meanwhile waits for the next, or, past the bounds of a
    batch, for a later one. So a batch is decided on what is durable and on nothing else, and one that fails
    leaves nothing behind. Batches of several runs share the journal's commits, one batch of each.

    A run that is forgotten begins anew with empty spaces. It may come again under its name while a batch of its
    old life is still being committed: the batch is not applied to the new spaces, its entries are deleted from
    the journal, and a new batch begins only after it. So no entry of the old life is seen again, and no
    deletion of one reaches an entry of the new.
    """

    def __init__(
        self,
        spaces: RunSpaces,
        *,
        journal: StoreJournal,
        current_round: Callable[[str], int | None],
        latest_round: Callable[[str], int | None],
        check_lease: CheckLease,
        check_owned: CheckOwned,
        limits: StoreLimits,
        on_journal_failure: Callable[[Exception], None],
    ) -> None:
        """Serve what is in `spaces`; the other arguments are those of StoreService."""
        self.spaces = spaces
        self.waits = Waits(spaces.run_id, limits)
        self._journal = journal
        self._current_round = current_round
        self._latest_round = latest_round
        self._check_lease = check_lease
        self._check_owned = check_owned
        self._limits = limits
        self._on_journal_failure = on_journal_failure
        self._queue: deque[_PendingWrite] = deque()
        self._queued_bytes = 0
        self._sweep = StoreSweep()
        # What a run that was forgotten held. The journal drops it by itself; here it goes bit by bit.
        self._released: Iterator[object] = iter(())
        self._committing: asyncio.Task[None] | None = None
        # What is being committed.
        self._batch: Sequence[_PendingWrite] = ()
        self._retired = False
        # The kind of the unexpected error that stopped it, if one has.
        self._broken = ""

    @property
    def committing(self) -> asyncio.Task[None] | None:
        """What ends when there is nothing left to write; None: there is nothing to write."""
        return self._committing

    def current_round(self) -> int:
        """Return the one round whose workers may write, as it is durable; 0 before the first.

        Raises:
            RunNotFound: There is no such run, or no more.
        """
        return self._known(self._current_round(self.spaces.run_id))

    def _known(self, round: int | None) -> int:
        if round is None:
            raise RunNotFound(self.spaces.run_id)
        return round

    async def write(self, write: Write[T]) -> T:
        """Carry a write out; return its answer when it is durable. See StoreService.write."""
        # Checked again when it is decided; here, so that a hopeless write doesn't wait for a commit. Rounds are checked
        # then only: the write may be the repetition of one that is being committed.
        self._check_writer(write)
        size = write.queued_bytes
        if self._queue and self._queued_bytes + size > self._limits.queued_bytes:
            raise StoreBusy(self.spaces.run_id, self._queued_bytes, _BUSY_RETRY)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._queue.append(_PendingWrite(write, size, answer))
        self._queued_bytes += size
        self._start_committing()
        return await answer

    def forget_rounds_before(self, round: int) -> None:
        """Drop all rounds before `round`, from the journal too; end who waits in them."""
        self.sweep(self.spaces.forget_rounds_before(round))
        for old in self.waits.rounds:
            if 0 < old < round:
                self.waits.end([old], partial(RoundOver, self.spaces.run_id, old, round))

    def forget(self) -> None:
        """Drop everything but what the journal holds; refuse who waits for it."""
        run_id = self.spaces.run_id
        self._released = chain(self._released, self._sweep.take_all(), self.spaces.forget())
        self.spaces = RunSpaces(run_id)
        self._broken = ""
        self._refuse(RunNotFound)
        self._start_committing()

    def check_whole(self) -> None:
        """Check that no unexpected error has stopped the store.

        Raises:
            RunBroken: One has.
        """
        if self._broken:
            raise RunBroken(self.spaces.run_id, self._broken)

    def stop(self, refusal: RunBroken) -> None:
        """Refuse who waits and what comes, for good: what is here may not be what is durable."""
        self._broken = refusal.cause
        self._refuse(lambda run_id: RunBroken(run_id, refusal.cause))

    def retire(self, refusal: Refusal) -> None:
        """Refuse who waits; the batch under way is the last. What is left to delete, the next to open does."""
        self._retired = True
        self._refuse(refusal)

    def halt(self, refusal: Refusal) -> None:
        """Refuse who waits, and leave the batch under way to its fate; whoever calls this cancels `committing`."""
        self.retire(refusal)
        for pending in self._batch:
            settle(pending.reply, of_unknown_outcome(refusal(self.spaces.run_id)))

    def _refuse(self, refusal: Refusal) -> None:
        run_id = self.spaces.run_id
        self.waits.end(self.waits.rounds, partial(refusal, run_id))
        for pending in self._queue:
            settle(pending.reply, refusal(run_id))
        self._queue.clear()
        self._queued_bytes = 0

    def sweep(self, deletions: Iterable[StoreChange]) -> None:
        """Delete from the journal what is in no space any more."""
        self._sweep.add(deletions)
        if self._sweep:
            self._start_committing()

    def _check_writer(self, write: Write[Any]) -> None:
        if (writer := write.writer) is None:
            return
        run_id = self.spaces.run_id
        try:
            self._check_lease(run_id, writer.node_id, writer.lease)
        except NodeIsEvicted as refusal:
            # Whoever writes for a node need not know why its lease has ended.
            why = f"an operator took the node out ({refusal.reason})"
            raise LeaseLost(run_id, writer.node_id, writer.lease, None, why) from refusal

    def _start_committing(self) -> None:
        if self._committing is None and not self._retired:
            self._committing = asyncio.get_running_loop().create_task(self._commit())

    async def _commit(self) -> None:
        """Commit batch after batch until nothing is left to write."""
        try:
            left = True
            while left:
                await self._commit_batch()
                released = sum(1 for _ in islice(self._released, _SWEEP))
                # A journal that never makes anyone wait must not let a long queue keep all others out.
                await asyncio.sleep(0)
                left = bool(self._queue or self._sweep or released) and not self._retired
        finally:
            self._committing = None

    async def _commit_batch(self) -> None:
        self._batch = batch = list[_PendingWrite]()
        draft = RunDraft(self.spaces, self._limits)
        try:
            outcomes = [self._decide(draft, pending.write) for pending in self._next_writes(draft, batch)]
            entries = draft.values()
            records = draft.records()
            # First, so that what the batch sets anew is there in the end.
            swept = self._sweep.take(_SWEEP, self.spaces.holds)
            failure = await self._append([*swept, *entries, *records])
            if failure is None:
                # The batch is durable. No await until all are told: no reader sees half of it.
                failure = self._take_over(draft, entries, records)
            for pending, outcome in zip(batch, outcomes, strict=True):
                settle(pending.reply, failure or outcome)
        except Exception as error:
            # A mistake of ours, in this run: others go on.
            broken = RunBroken(self.spaces.run_id, type(error).__name__)
            _log.exception("store.run_stopped", error=error, run_id=broken.run_id)
            for pending in batch:
                settle(pending.reply, RunBroken(broken.run_id, broken.cause))
            self.stop(broken)
        finally:
            # Whatever went wrong here, nobody waits for ever.
            for pending in batch:
                pending.reply.cancel()
            self._batch = ()

    def _next_writes(self, draft: RunDraft, batch: list[_PendingWrite]) -> Iterator[_PendingWrite]:
        """Move writes from the queue to the batch, one after another is decided, until it is full."""
        limits, taken_bytes = self._limits, 0
        while (
            self._queue
            and max(len(batch), draft.changed_entries) < limits.batch_entries
            and max(taken_bytes, draft.changed_bytes) < limits.batch_bytes
        ):
            pending = self._queue.popleft()
            self._queued_bytes -= pending.size
            # A write whose caller has gone is left out: its outcome is unknown to the caller anyway.
            if not pending.reply.done():
                taken_bytes += pending.size
                batch.append(pending)
                yield pending

    def _decide(self, draft: RunDraft, write: Write[Any]) -> object:
        """Return the write's answer, or why it was refused."""
        try:
            # By the latest facts, durable or not. No write can be decided while its round lasts, and become durable
            # after the end of that: what is decided is appended in this very step of the event loop, the fact that ends
            # the round in that of its own decision, and a journal makes durable in the order of appending. So a write
            # that was decided first is durable, and answered, no later than the end of its round is; and one that comes
            # to be decided after that, be it still under way, is refused.
            latest_round = self._known(self._latest_round(self.spaces.run_id))
            self._check_writer(write)
            return decide(draft, write, latest_round)
        except Refused as refusal:
            return refusal

    async def _append(self, entries: list[StoreChange]) -> Refused | None:
        run_id = self.spaces.run_id
        try:
            if entries:
                await self._journal.append(entries)
            else:
                self._check_owned(run_id)
        except NotOwner as refusal:
            return refusal
        except OwnershipLost as error:
            self._on_journal_failure(error)
            return OutcomeUnknown(run_id)
        except Exception as error:
            _log.error("store.journal_failed", run_id=run_id, entries=len(entries), error=str(error))
            self._on_journal_failure(error)
            return JournalFailed(str(error))
        return None

    def _take_over(
        self, draft: RunDraft, entries: Sequence[StoreChange], records: Sequence[StoreChange]
    ) -> RunNotFound | None:
        """Apply what is durable, and tell whom it concerns, in the order of the writes."""
        forgotten = draft.run is not self.spaces
        if not forgotten:
            for step in draft.steps():
                for change in step:
                    self.spaces.apply(change)
                self.waits.settle(self.spaces, step)
            for record in records:
                self.spaces.apply(record)
        # What ended while it was committed: the journal mustn't keep it. Records outlive their round.
        oldest = self.spaces.oldest_round
        over = chain(
            entries if forgotten else (entry for entry in entries if 0 < entry.round < oldest),
            records if forgotten else (),
        )
        self._sweep.add(replace(entry, value=None) for entry in over if entry.value is not None)
        return RunNotFound(self.spaces.run_id) if forgotten else None
