"""The fenced states of all runs: set in batches, one at a time; nothing is published before it is durable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from rallypoint.rendezvous.base.cooperative import LatestValue, Work, finish, settle
from rallypoint.rendezvous.base.entries import (
    LEASE_REFUSALS,
    RunData,
    StoreChange,
    StoreJournal,
    WriteAdmission,
)
from rallypoint.rendezvous.base.errors import NotOwner, Refusal, RunBroken, draining_error, of_unknown_outcome
from rallypoint.rendezvous.base.limits import STATE_TTL, Quota, SharedTotals, StateLimits
from rallypoint.rendezvous.base.ownership import CheckOwned, always_owned
from rallypoint.rendezvous.base.refusals import JournalFailed, StateBusy, TooManyWatchers
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.journal.journal import JournalError, OwnershipLost
from rallypoint.rendezvous.state.core import (
    NONCE_BYTES,
    FencedState,
    LastUsed,
    SetOutcome,
    SetState,
    States,
    StatesDraft,
)
from rallypoint.rpc.logs import get_logger

# Deletions of expired states go to the journal in portions of this size, so that they do not delay a set.
_SWEEP = 1_000

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StateView:
    """The state sent to a watcher.

    Attributes:
        current: The state; None: there is none.
    """

    current: FencedState | None


@dataclass(slots=True, eq=False)
class _PendingSet:
    """A set that waits for its commit."""

    request: SetState
    reply: asyncio.Future[SetOutcome]


class FencedStateService(RunData):
    """The fenced states of all runs of one journal.

    One task changes them: it takes all waiting requests, decides them on durable state, commits the changes as one
    group, and only then replies, notifies watchers, and takes the next. Readers see durable state only.
    """

    def __init__(
        self,
        journal: StoreJournal,
        admission: WriteAdmission,
        entries: Iterable[StoreChange] = (),
        *,
        clock: Callable[[], float],
        draw: Callable[[int], bytes],
        check_owned: CheckOwned = always_owned,
        limits: StateLimits | None = None,
        totals: SharedTotals | None = None,
        ttl: float = STATE_TTL,
    ) -> None:
        """Build the states from their journal's entries, at once; `serve` makes the service work.

        Args:
            journal: Makes states durable.
            admission: Refuses a set that names a writer whose node doesn't hold its lease.
            entries: The journal's entries in the space `core.SPACE`. If there may be many, see `restoring`.
            clock: Monotonic seconds.
            draw: Returns so many random bytes, never the same ones twice: fencing depends on it.
            check_owned: Raises NotOwner once the states may be another process's.
            limits: Bounds of the service.
            totals: Totals shared by all shards of the service; None: there is one shard.
            ttl: Seconds that a state is kept without a read, a set or a watch.

        Raises:
            JournalError: An entry can't be read by this version.
        """
        self._journal = journal
        self._clock = clock
        self._draw = draw
        self._admission = admission
        self._check_owned = check_owned
        self._limits = limits or StateLimits()
        self._states = States()
        self._used = LastUsed(ttl)
        self._watchers: dict[str, set[LatestValue[StateView]]] = {}
        totals = totals or SharedTotals()
        self._count, self._bytes = Quota(totals.states), Quota(totals.state_bytes)
        self._watching = Quota(totals.state_watchers)
        self._queue: list[_PendingSet] = []
        self._queued_bytes = Quota(totals.state_queued_bytes)
        self._under_way: Sequence[_PendingSet] = ()
        self._retired = False
        self._unanswered: set[asyncio.Future[SetOutcome]] = set()
        self._forgotten: set[str] = set()
        self._wake = asyncio.Event()
        self._closed: Refusal | None = None
        finish(self.restoring(entries))

    def restoring(self, entries: Iterable[StoreChange]) -> Work[None]:
        """Build the states from their journal's entries, in small steps. Every state gets its full time to live again.

        Must end before the first request. The states are added to the totals only at its end.

        Raises:
            JournalError: An entry can't be read by this version.
        """
        try:
            self._states = yield from States.restore(entries)
        except ValueError as error:
            raise JournalError(f"the journal can't be read by this version: {error}") from error
        now = self._clock()
        for run_id in self._states.runs():
            self._used.touch(run_id, now)
        self._count.add(len(self._states))
        self._bytes.add(self._states.used_bytes)

    @property
    def watcher_count(self) -> int:
        """Number of open watches."""
        return self._watching.own

    async def serve(self) -> None:
        """Set states and drop expired ones, until retired or cancelled.

        Raises:
            Exception: The journal's error: it accepts no more, so the service must be rebuilt from the durable entries.
        """
        try:
            while True:
                await self._wait_for_work()
                if self._retired:
                    return
                self._under_way = self._take_queue()
                await self._commit(self._under_way)
                self._under_way = ()
        except BaseException as error:
            # After any error: no caller may wait for a result that can't come any more.
            self._break(error)
            raise

    def _take_queue(self) -> list[_PendingSet]:
        taken, self._queue = self._queue, []
        self._queued_bytes.release()
        return taken

    def _break(self, error: BaseException) -> None:
        if isinstance(error, OwnershipLost):
            self.halt(NotOwner)
            return
        detail = str(error)
        refusal = (lambda _: JournalFailed(detail)) if isinstance(error, Exception) else draining_error
        self._close(refusal)
        for pending in [*self._under_way, *self._take_queue()]:
            settle(pending.reply, refusal(pending.request.run_id))

    def retire(self, refusal: Refusal) -> None:
        """Refuse waiting and later requests; `serve` returns after the commit in flight. Watches stay open."""
        self._closed = refusal
        self._retired = True
        for pending in self._take_queue():
            settle(pending.reply, refusal(pending.request.run_id))
        self._wake.set()

    def halt(self, refusal: Refusal) -> None:
        """End everything at once; publish nothing more. The caller cancels `serve`."""
        self.retire(refusal)
        for pending in self._under_way:
            settle(pending.reply, of_unknown_outcome(refusal(pending.request.run_id)))
        for run_id, slots in self._watchers.items():
            for slot in slots:
                slot.cut(refusal(run_id))

    def release(self) -> None:
        """Subtract this service's share from the totals; watches do so as they end."""
        self._count.release()
        self._bytes.release()

    def get(self, run_id: str) -> FencedState | None:
        """Return the current state of a run, or None. Raise Refused if the service has ended or is not the owner."""
        self._check_open(run_id)
        return self._read(run_id)

    async def set(self, request: SetState) -> SetOutcome:
        """Set a state if its token is the current one; return when it, or the state it lost against, is durable.

        Cancelling the caller leaves the outcome unknown.

        Raises:
            Refused: It was refused; JournalFailed and OutcomeUnknown leave the outcome unknown.
        """
        self._check_open(request.run_id)
        queued = self._queued_bytes.together
        if queued and queued + request.queued_bytes > self._limits.queued_bytes:
            raise StateBusy(queued)
        answer: asyncio.Future[SetOutcome] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._queue.append(_PendingSet(request, answer))
        self._queued_bytes.add(request.queued_bytes)
        self._wake.set()
        try:
            return await answer
        except LEASE_REFUSALS:
            await self._admission.settled()
            raise

    def watch(self, run_id: str, token: bytes | None) -> LatestValue[StateView]:
        """Return a LatestValue with the state of a run: now, unless `token` is its token, and after every change.

        Return it with `unwatch`.

        Raises:
            Refused: There are too many watchers, or the service has ended.
        """
        self._check_open(run_id)
        if self._watching.together >= self._limits.watchers:
            raise TooManyWatchers(self._limits.watchers)
        slot: LatestValue[StateView] = LatestValue()
        current = self._read(run_id)
        if current is None or current.token != token:
            slot.put(StateView(current))
        self._watchers.setdefault(run_id, set()).add(slot)
        self._watching.add(1)
        return slot

    def unwatch(self, run_id: str, slot: LatestValue[StateView]) -> None:
        """End a watch."""
        watchers = self._watchers[run_id]
        watchers.remove(slot)
        self._watching.add(-1)
        if not watchers:
            del self._watchers[run_id]
            self._read(run_id)  # its time to live begins with the end of the watch

    def forget_rounds_before(self, run_id: str, round: int) -> None:
        """Do nothing: a state outlives its round."""

    def stop_run(self, refusal: RunBroken) -> None:
        """Do nothing: a state needs no run."""

    def forget_run(self, run_id: str) -> None:
        """Drop the state of a run, if it has one; sets already waiting find none."""
        self._forgotten.add(run_id)
        self._wake.set()

    async def drain(self) -> None:
        """Accept no more requests, end all watches with Draining, and return when accepted requests are answered."""
        self._close(draining_error)
        if self._unanswered:
            await asyncio.wait(self._unanswered)

    def _check_open(self, run_id: str) -> None:
        if self._closed is not None:
            raise self._closed(run_id)
        self._check_owned(run_id)

    def _close(self, refusal: Refusal) -> None:
        self._closed = self._closed or refusal
        self.end_streams(refusal)

    def end_streams(self, refusal: Refusal) -> None:
        """End every watch, each with a refusal, after the state that still waits to be sent on it."""
        for run_id, slots in self._watchers.items():
            for slot in slots:
                slot.end(refusal(run_id))

    def _read(self, run_id: str) -> FencedState | None:
        held = self._states.held(run_id)
        if held is None:
            return None
        self._used.touch(run_id, self._clock())
        return held.current

    async def _wait_for_work(self) -> None:
        deadline = self._used.next_deadline()
        timeout = None if deadline is None else max(0.0, deadline - self._clock())
        with contextlib.suppress(TimeoutError):  # a state may have expired
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        self._wake.clear()

    async def _commit(self, batch: Sequence[_PendingSet]) -> None:
        draft = StatesDraft(self._states, self._limits, self._count.others, self._bytes.others)
        forgotten, self._forgotten = self._forgotten, set()
        for run_id in forgotten:
            draft.drop(run_id)
        # Skip a set whose caller is gone: its outcome is unknown to the caller anyway.
        decided = [
            (pending, self._decide(draft, pending.request)) for pending in batch if not pending.reply.done()
        ]
        self._drop_expired(draft)
        # Counted before it is durable, so that other shards do not take the same room meanwhile.
        self._count.add(draft.count - self._count.own)
        self._bytes.add(draft.used_bytes - self._bytes.own)
        if entries := draft.entries():
            await self._journal.append(entries)
        else:
            decided = [(pending, self._if_owned(pending, outcome)) for pending, outcome in decided]
        for run_id, held in draft.changed.items():
            self._states.apply(run_id, held)
            self._publish(run_id)
        for pending, outcome in decided:
            settle(pending.reply, outcome)

    def _if_owned(self, pending: _PendingSet, outcome: SetOutcome | Refused) -> SetOutcome | Refused:
        """Return the outcome of a set that made nothing durable, or a refusal if we are not the owner."""
        try:
            self._check_owned(pending.request.run_id)
        except NotOwner as refusal:
            return refusal
        return outcome

    def _decide(self, draft: StatesDraft, request: SetState) -> SetOutcome | Refused:
        """Return the outcome of a set, or its refusal."""
        try:
            # A repetition gets its old result, even if another node holds the lease now.
            if (repeated := draft.repetition(request)) is not None:
                return repeated
            if request.writer is not None:
                self._admission.check_lease(request.run_id, request.writer.node_id, request.writer.lease)
            return draft.set(request, self._draw(NONCE_BYTES))
        except Refused as refusal:
            return refusal
        except Exception as error:
            # A bug of ours, with this state: nothing of it was changed, and others go on.
            _log.exception("state.set_failed", error=error, run_id=request.run_id)
            return RunBroken(request.run_id, type(error).__name__)
        finally:
            self._read(request.run_id)  # an attempt to set it is a use

    def _drop_expired(self, draft: StatesDraft) -> None:
        now = self._clock()
        for run_id in self._used.due(now):
            if run_id in self._watchers or run_id in draft.changed:
                self._used.touch(run_id, now)
                continue
            if draft.entry_count >= _SWEEP:
                return  # the rest follows at once
            self._used.discard(run_id)
            draft.drop(run_id)
            _log.info("state expired", run_id=run_id)

    def _publish(self, run_id: str) -> None:
        """Send durable changes to the watchers."""
        current = self._read(run_id)
        if current is None:
            self._used.discard(run_id)
        for slot in self._watchers.get(run_id, ()):
            slot.put(StateView(current))
