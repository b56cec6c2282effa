"""The fenced states of all runs: set one batch at a time, and nothing told before it is durable."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from rallypoint.rendezvous.answers import settle
from rallypoint.rendezvous.core.refusals import Refused
from rallypoint.rendezvous.errors import Draining
from rallypoint.rendezvous.fenced_state.core import (
    Draft,
    FencedState,
    SetOutcome,
    SetState,
    StateLimits,
    States,
)
from rallypoint.rendezvous.fenced_state.last_used import LastUsed
from rallypoint.rendezvous.fenced_state.refusals import StateBusy, TooManyWatchers
from rallypoint.rendezvous.fenced_state.tokens import NONCE_BYTES
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.slot import Slot
from rallypoint.rendezvous.store.ports import (
    LEASE_REFUSALS,
    CheckLease,
    Settled,
    StoreChange,
    StoreJournal,
    at_once,
)
from rallypoint.rendezvous.store.refusals import JournalFailed
from rallypoint.serving.logs import get_logger

# As long as torch's etcd rendezvous keeps its state. Shorter frees memory sooner; a job whose nodes are silent for
# longer than this must begin anew. Seconds.
DEFAULT_TTL = 7_200.0

# Deletions of expired states go to the journal so many at a time: they must not hold up a set.
_SWEEP = 1_000

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class StateView:
    """What a watcher is told.

    Attributes:
        current: The state; None: there is none.
    """

    current: FencedState | None


@dataclass(slots=True, eq=False)
class _Pending:
    """A set that waits for its commit."""

    request: SetState
    answer: asyncio.Future[SetOutcome]


class FencedStateService:
    """The fenced states of all runs of one journal.

    One task changes them: it takes all requests that wait, decides them on what is durable, commits what comes of
    it as one group, and only then answers, tells watchers, and takes the next. Readers see what is durable.

    Attributes:
        watcher_count: How many watch a state.
    """

    def __init__(
        self,
        journal: StoreJournal,
        entries: Iterable[StoreChange] = (),
        *,
        clock: Callable[[], float],
        draw: Callable[[int], bytes],
        check_lease: CheckLease = lambda run_id, node_id, lease: None,
        settled: Settled = at_once,
        limits: StateLimits | None = None,
        ttl: float = DEFAULT_TTL,
    ) -> None:
        """Build the states from what their journal holds; `serve` makes the service work.

        Args:
            journal: Where states become durable.
            entries: What the journal holds in the space `core.SPACE`. Every state gets a full new time to live.
            clock: Monotonic seconds.
            draw: Returns so many random bytes, never the same ones again: the fence stands on it.
            check_lease: Refuses a node that doesn't hold its lease. Asked when a set that names a writer is decided.
            settled: Returns when what a lease was refused for is durable: nobody is told of it before.
            limits: Bounds of the service.
            ttl: How long a state is kept that nobody reads, sets or watches, seconds.

        Raises:
            JournalError: An entry can't be read by this version.
        """
        self._journal = journal
        self._clock = clock
        self._draw = draw
        self._check_lease = check_lease
        self._settled = settled
        self._limits = limits or StateLimits()
        try:
            self._states = States.restore(entries)
        except ValueError as error:
            raise JournalError(f"the journal can't be read by this version: {error}") from error
        self._used = LastUsed(ttl)
        for run_id in self._states.runs():
            self._used.touch(run_id, clock())
        self._watchers: dict[str, set[Slot[StateView]]] = {}
        self.watcher_count = 0
        self._queue: list[_Pending] = []
        self._queued_bytes = 0
        self._unanswered: set[asyncio.Future[SetOutcome]] = set()
        self._forgotten: set[str] = set()
        self._wake = asyncio.Event()
        self._closed: Callable[[], Refused] | None = None

    async def serve(self) -> None:
        """Set states and drop what expired, until cancelled.

        Raises:
            Exception: What the journal raised: it takes no more, so the process must end, and start again from
                what is durable.
        """
        batch: list[_Pending] = []
        try:
            while True:
                await self._wait_for_work()
                batch, self._queue, self._queued_bytes = self._queue, [], 0
                await self._commit(batch)
        except BaseException as error:
            # Whatever it is: nobody may wait for an answer that can't come any more.
            failed = isinstance(error, Exception)
            refusal = partial(JournalFailed, str(error)) if failed else Draining
            self._close(refusal)
            for pending in [*batch, *self._queue]:
                settle(pending.answer, refusal())
            raise

    def get(self, run_id: str) -> FencedState | None:
        """Return the current state of a run; None: there is none.

        Raises:
            Refused: The service has ended.
        """
        self._check_open()
        return self._read(run_id)

    async def set(self, request: SetState) -> SetOutcome:
        """Set a state if its token allows; return when it, or the state it lost against, is durable.

        Cancelling the caller leaves the outcome unknown.

        Raises:
            Refused: It was refused; JournalFailed leaves the outcome unknown.
        """
        self._check_open()
        if self._queue and self._queued_bytes + request.queued_bytes > self._limits.queued_bytes:
            raise StateBusy(self._queued_bytes)
        answer: asyncio.Future[SetOutcome] = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._queue.append(_Pending(request, answer))
        self._queued_bytes += request.queued_bytes
        self._wake.set()
        try:
            return await answer
        except LEASE_REFUSALS:
            await self._settled()
            raise

    def watch(self, run_id: str, token: bytes | None) -> Slot[StateView]:
        """Return a slot that gets the state of a run: now, unless `token` is its token, and after every change.

        Give it back with `unwatch`.

        Raises:
            Refused: There are too many watchers, or the service has ended.
        """
        self._check_open()
        if self.watcher_count >= self._limits.watchers:
            raise TooManyWatchers(self._limits.watchers)
        slot: Slot[StateView] = Slot()
        current = self._read(run_id)
        if current is None or current.token != token:
            slot.put(StateView(current))
        self._watchers.setdefault(run_id, set()).add(slot)
        self.watcher_count += 1
        return slot

    def unwatch(self, run_id: str, slot: Slot[StateView]) -> None:
        """Take a slot back."""
        watchers = self._watchers[run_id]
        watchers.remove(slot)
        self.watcher_count -= 1
        if not watchers:
            del self._watchers[run_id]
            self._read(run_id)  # its time begins with the end of the watch

    def forget_run(self, run_id: str) -> None:
        """Drop the state of a run, if it has one; sets that wait already find none."""
        self._forgotten.add(run_id)
        self._wake.set()

    async def drain(self) -> None:
        """Take no more requests, end all watches with Draining, and return when what was taken is answered."""
        self._close(Draining)
        if self._unanswered:
            await asyncio.wait(self._unanswered)

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed()

    def _close(self, refusal: Callable[[], Refused]) -> None:
        # A new refusal each time: one that is raised again and again would collect every traceback.
        self._closed = self._closed or refusal
        for slots in self._watchers.values():
            for slot in slots:
                slot.end(refusal())

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

    async def _commit(self, batch: list[_Pending]) -> None:
        draft = Draft(self._states, self._limits)
        forgotten, self._forgotten = self._forgotten, set()
        for run_id in forgotten:
            draft.drop(run_id)
        # A set whose caller has gone is left out: its outcome is unknown to the caller anyway.
        decided = [
            (pending.answer, self._decide(draft, pending.request))
            for pending in batch
            if not pending.answer.done()
        ]
        self._drop_expired(draft)
        if entries := draft.entries():
            await self._journal.append(entries)
        for run_id, held in draft.changed.items():
            self._states.apply(run_id, held)
            self._tell(run_id)
        for answer, outcome in decided:
            settle(answer, outcome)

    def _decide(self, draft: Draft, request: SetState) -> SetOutcome | Refused:
        """Return how a set goes, or why it is refused."""
        try:
            # A repetition is told what happened, whoever holds the lease by now.
            if (repeated := draft.repetition(request)) is not None:
                return repeated
            if request.writer is not None:
                self._check_lease(request.run_id, request.writer.node_id, request.writer.lease)
            return draft.set(request, self._draw(NONCE_BYTES))
        except Refused as refusal:
            return refusal
        finally:
            self._read(request.run_id)  # who tried to set it has use for it

    def _drop_expired(self, draft: Draft) -> None:
        now = self._clock()
        for run_id in self._used.due(now):
            if run_id in self._watchers or run_id in draft.changed:
                self._used.touch(run_id, now)
                continue
            if draft.entry_count >= _SWEEP:
                return  # the rest is due at once
            self._used.discard(run_id)
            draft.drop(run_id)
            _log.info("state expired", run_id=run_id)

    def _tell(self, run_id: str) -> None:
        """Tell watchers what has become durable."""
        current = self._read(run_id)
        if current is None:
            self._used.discard(run_id)
        for slot in self._watchers.get(run_id, ()):
            slot.put(StateView(current))
