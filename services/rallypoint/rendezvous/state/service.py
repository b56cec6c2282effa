"""The fenced states of all runs: set in batches, one at a time; nothing is published before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rallypoint.rendezvous.base.cooperative import LatestValue, Work
from rallypoint.rendezvous.base.entries import (
    LEASE_REFUSALS,
    RunData,
    StoreChange,
    StoreJournal,
    WriteAdmission,
)
from rallypoint.rendezvous.base.errors import Refusal, RunBroken, draining_error
from rallypoint.rendezvous.base.limits import STATE_TTL, Quota, SharedTotals, StateLimits
from rallypoint.rendezvous.base.refusals import StateBusy, TooManyWatchers
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.journal.commit_loop import CheckOwned, CommitLoop, PendingRequest, always_owned
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.state.core import (
    NONCE_BYTES,
    FencedState,
    LastUsed,
    SetOutcome,
    SetState,
    StateCreators,
    States,
    StatesDraft,
)
from rallypoint.rpc.logs import get_logger

# Deletions of expired states go to the journal in portions of this size, so that they do not delay a set.
_SWEEP = 1_000

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StateView:
    """The state sent to a watcher; None: there is none."""

    current: FencedState | None


@dataclass(slots=True, eq=False, kw_only=True)
class _PendingSet(PendingRequest[SetOutcome]):
    """A set that waits for its commit."""

    request: SetState


class FencedStateService(CommitLoop[_PendingSet], RunData):
    """The fenced states of all runs of one journal.

    Readers see durable state only.
    """

    def __init__(
        self,
        journal: StoreJournal,
        admission: WriteAdmission,
        *,
        clock: Callable[[], float],
        draw: Callable[[int], bytes],
        check_owned: CheckOwned = always_owned,
        limits: StateLimits | None = None,
        totals: SharedTotals | None = None,
        ttl: float = STATE_TTL,
    ) -> None:
        """Build a service without states; see `restoring`. `serve` makes it work.

        Args:
            journal: Makes states durable.
            admission: Refuses a set that names a writer whose node doesn't hold its lease.
            clock: Monotonic seconds.
            draw: Returns so many random bytes, never the same ones twice: fencing depends on it.
            check_owned: Raises NotOwner once the states may be another process's.
            limits: Bounds of the service.
            totals: Totals shared by all shards of the service; None: there is one shard.
            ttl: Seconds that a state is kept without a read, a set or a watch.
        """
        totals = totals or SharedTotals()
        super().__init__(journal, check_owned, queued_bytes=totals.state_queued_bytes)
        self._clock = clock
        self._draw = draw
        self._admission = admission
        self._limits = limits or StateLimits()
        self._states = States()
        self._creators = StateCreators(self._limits, totals)
        self._used = LastUsed(ttl)
        self._watchers: dict[str, set[LatestValue[StateView]]] = {}
        self._count, self._bytes = Quota(totals.states), Quota(totals.state_bytes)
        self._watching = Quota(totals.state_watchers)
        self._forgotten: set[str] = set()

    def restoring(self, entries: Iterable[StoreChange]) -> Work[None]:
        """Build the states from their journal's entries, in small steps. Every state gets its full time to live again.

        Must end before the first request. The states are added to the totals only at its end.

        Args:
            entries: The journal's entries in the space `core.SPACE`.

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

    def streams(self) -> Iterator[tuple[str, LatestValue[StateView]]]:
        """Return all watches, each with the name of its run."""
        return ((run_id, slot) for run_id, slots in self._watchers.items() for slot in slots)

    def release(self) -> None:
        """Subtract this service's share from the totals; watches do so as they end."""
        self._count.release()
        self._bytes.release()
        self._creators.release()

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
        queued = self._waiting_bytes.together
        if queued and queued + request.queued_bytes > self._limits.queued_bytes:
            raise StateBusy(queued)
        pending = _PendingSet(run_id=request.run_id, queued_bytes=request.queued_bytes, request=request)
        self._put(pending)
        try:
            return await pending.reply
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

    def is_empty(self, run_id: str) -> bool:
        """Return True: a state outlives the end of its run, as it outlives rounds."""
        return True

    async def clear(self, run_id: str, refusal: Refusal) -> None:
        """Do nothing: see `is_empty`."""

    def forget_run(self, run_id: str) -> None:
        """Drop the state of a run, if it has one; sets already waiting find none."""
        self._forgotten.add(run_id)
        self._wake.set()

    async def drain(self) -> None:
        """Accept no more requests, end all watches with Draining, and return when accepted requests are answered."""
        self._closed = self._closed or draining_error
        self.end_streams(draining_error)
        if replies := [request.reply for request in (*self._under_way, *self._waiting)]:
            await asyncio.wait(replies)

    def _read(self, run_id: str) -> FencedState | None:
        held = self._states.held(run_id)
        if held is None:
            return None
        self._used.touch(run_id, self._clock())
        return held.current

    def timeout(self) -> float | None:
        """Return the seconds until a state may have expired; None: there is no state."""
        deadline = self._used.next_deadline()
        return None if deadline is None else max(0.0, deadline - self._clock())

    def commit(self, requests: Iterator[_PendingSet]) -> Iterator[Sequence[StoreChange]]:
        """Decide sets, and drop states that are forgotten or expired. See `CommitLoop`."""
        draft = StatesDraft(
            self._states, self._limits, self._creators, self._count.others, self._bytes.others
        )
        forgotten, self._forgotten = self._forgotten, set()
        for run_id in forgotten:
            draft.drop(run_id)
        # Skip a set whose caller is gone: its outcome is unknown to the caller anyway.
        decided = [
            (pending, self._decide(draft, pending.request))
            for pending in requests
            if not pending.reply.done()
        ]
        self._drop_expired(draft)
        # Counted before it is durable, so that other shards do not take the same room meanwhile.
        self._count.add(draft.count - self._count.own)
        self._bytes.add(draft.used_bytes - self._bytes.own)
        yield draft.entries()
        for run_id, held in draft.changed.items():
            self._states.apply(run_id, held)
            self._publish(run_id)
        for pending, outcome in decided:
            pending.settle(outcome)

    def _decide(self, draft: StatesDraft, request: SetState) -> SetOutcome | Refused:
        """Return the outcome of a set, or its refusal."""
        try:
            # A repetition gets its old result, even if another node holds the lease now.
            if (repeated := draft.repetition(request)) is not None:
                return repeated
            if (writer := request.writer) is not None:
                self._admission.check_lease(request.run_id, writer.node_id, writer.lease, writer.token)
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
