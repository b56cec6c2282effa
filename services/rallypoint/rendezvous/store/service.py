"""The store of all runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from rallypoint.rendezvous.base.cooperative import Work
from rallypoint.rendezvous.base.entries import (
    LEASE_REFUSALS,
    RunData,
    StoreChange,
    StoreJournal,
    WriteAdmission,
)
from rallypoint.rendezvous.base.errors import Draining, Refusal, RunBroken, draining_error
from rallypoint.rendezvous.base.limits import FRAME_BYTES, MAX_MULTI_BYTES, SharedTotals, StoreLimits
from rallypoint.rendezvous.base.refusals import AnswerTooLarge, KeyWaitTimedOut, RoundNotBegun
from rallypoint.rendezvous.core.commands import Refused, RoundOver, RunNotFound
from rallypoint.rendezvous.journal.commit_loop import CheckOwned, always_owned
from rallypoint.rendezvous.journal.journal import JournalError
from rallypoint.rendezvous.store.core import RunSpaces
from rallypoint.rendezvous.store.store import RunStore
from rallypoint.rendezvous.store.writes import Write

T = TypeVar("T")


class StoreService(RunData):
    """The store of all runs.

    Readers see durable state only. A waiting request is ended by the write that completes it.
    """

    def __init__(
        self,
        journal: StoreJournal,
        admission: WriteAdmission,
        *,
        limits: StoreLimits | None = None,
        totals: SharedTotals | None = None,
        check_owned: CheckOwned = always_owned,
        on_journal_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Build an empty store; see `restoring`. To be called in the event loop that serves it.

        Args:
            journal: Makes writes durable.
            admission: The rounds and leases by which requests are judged.
            limits: Bounds of each run, and of all together.
            totals: The counters that all shards of the process share; None: there is no other shard.
            check_owned: Raises NotOwner once the runs may be another process's.
            on_journal_failure: Called with the journal's error: it accepts no more, so the process must start again.
        """
        self._admission = admission
        self._check_owned = check_owned
        self._open_run = partial(
            RunStore,
            journal=journal,
            admission=admission,
            check_owned=check_owned,
            limits=limits or StoreLimits(),
            totals=totals or SharedTotals(),
            on_journal_failure=on_journal_failure,
        )
        self._runs: dict[str, RunStore] = {}
        self._closed: Refusal | None = None

    def restoring(self, entries: Iterable[StoreChange]) -> Work[None]:
        """Build the store from its journal's entries, in small steps; call `begin` before the first request.

        Raises:
            JournalError: An entry can't be read by this version.
        """
        by_run: dict[str, list[StoreChange]] = {}
        for entry in entries:
            by_run.setdefault(entry.run_id, []).append(entry)
            yield
        for run_id, of_run in by_run.items():
            try:
                spaces = yield from RunSpaces.restore(run_id, of_run)
            except ValueError as error:
                raise JournalError(f"the journal can't be read by this version: {error}") from error
            self._runs[run_id] = self._open_run(spaces)

    def begin(self) -> None:
        """Begin to delete obsolete entries from the journal: of ended rounds, and of runs that no longer exist.

        A killed store may have left them. Once begun, the store must be retired or halted.
        """
        for run_id, run in [*self._runs.items()]:
            run.sweep(run.spaces.outdated())
            try:
                current_round = self._admission.writable_round(run_id)
            except Refused:
                continue  # the run is unknown, so nothing is deleted
            if current_round is None:
                run.sweep(run.spaces.forget())
                self._drop_when_idle(run_id, run)
            else:
                run.forget_rounds_before(current_round)

    async def write(self, run_id: str, write: Write[T]) -> T:
        """Carry a write out; return its result when it, and the facts it was judged by, are durable.

        A write of a round gets a successful reply before the end of that round is announced, or never, unless it
        repeats one that was carried out (see StoreOperation in the contract). Cancelling the caller leaves the outcome
        unknown.

        Raises:
            Refused: It was refused; JournalFailed and OutcomeUnknown leave the outcome unknown.
        """
        try:
            answer = await self._run(run_id).write(write)
        except (*LEASE_REFUSALS, RoundOver, RoundNotBegun):
            await self._admission.settled()
            raise
        # An appended write is durable after the facts it was judged by. A write that changed nothing was not appended.
        if max(write.round, write.writer_round) > (self._admission.writable_round(run_id) or 0):
            await self._admission.settled()
        return answer

    async def get(self, run_id: str, round: int, key: str, timeout: float) -> bytes:
        """Return the value of a key, waiting for it up to `timeout` seconds.

        Raises:
            Refused: KeyWaitTimedOut, or the run, its round or the service ended.
        """
        run = self._reading(run_id, round)
        (value,) = await self._until_present(run, round, [key], timeout, wanted=[key])
        return value

    async def multi_get(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> list[bytes]:
        """Return the values of the keys at a moment when all are there, waiting up to `timeout` seconds.

        Raises:
            Refused: AnswerTooLarge, KeyWaitTimedOut, or the run, its round or the service ended.
        """
        run = self._reading(run_id, round)
        distinct = list(dict.fromkeys(keys))
        found = await self._until_present(run, round, distinct, timeout, wanted=distinct)
        by_key = dict(zip(distinct, found, strict=True))
        values = [by_key[key] for key in keys]
        check_reply_size(values)
        return values

    async def wait(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> None:
        """Return when all keys, each given once, are there, waiting up to `timeout` seconds.

        Raises:
            Refused: KeyWaitTimedOut, or the run, its round or the service ended.
        """
        run = self._reading(run_id, round)
        await self._until_present(run, round, keys, timeout)

    async def _until_present(
        self, run: RunStore, round: int, keys: Sequence[str], timeout: float, wanted: Sequence[str] = ()
    ) -> list[bytes]:
        try:
            return await run.waits.until_present(run.spaces, round, keys, timeout, wanted)
        except KeyWaitTimedOut:
            self._check_owned(run.spaces.run_id)  # the new owner may have set them meanwhile
            raise

    def check(self, run_id: str, round: int, keys: Sequence[str]) -> bool:
        """Return True if all keys are there."""
        return not self._reading(run_id, round).spaces.missing(round, keys)

    def list_keys(self, run_id: str, round: int, prefix: str, after: str, count: int) -> list[str]:
        """Return the first `count` keys that begin with `prefix` and come after `after`, by code points."""
        return self._reading(run_id, round).spaces.keys(round, prefix, after, count)

    def forget_rounds_before(self, run_id: str, round: int) -> None:
        """Drop all rounds before `round`; end the waits in them."""
        run = self._runs.get(run_id)
        if run is not None:
            run.forget_rounds_before(round)

    def forget_run(self, run_id: str) -> None:
        """Drop a run that has been forgotten; its waiting requests and writes fail with RunNotFound.

        A commit in flight is undone in the journal; if the process is killed before that, its next start does it, as
        long as there is no run.
        """
        run = self._runs.get(run_id)
        if run is not None:
            run.forget()
            self._drop_when_idle(run_id, run)

    def is_empty(self, run_id: str) -> bool:
        """Return True if a run has no entries, and none of its writes is being committed."""
        run = self._runs.get(run_id)
        return run is None or run.is_empty

    async def clear(self, run_id: str, refusal: Refusal) -> None:
        """Delete the entries of a closed run; return when that is durable, or the service ends."""
        if (run := self._runs.get(run_id)) is not None:
            await run.clear(refusal)

    def stop_run(self, refusal: RunBroken) -> None:
        """Refuse waiting, pending and later requests of a run; the journal keeps its entries."""
        run = self._runs.get(refusal.run_id)
        if run is not None:
            run.stop(refusal)

    async def drain(self) -> None:
        """Accept no more requests, end all waits with Draining, and return when accepted writes are durable."""
        self._closed = draining_error
        for run in self._runs.values():
            run.waits.end(run.waits.rounds, Draining)
        if committing := self.committing():
            # Not cancelled with the caller, whose grace may be over: durable writes must be reported as such.
            await asyncio.wait(committing)

    def release(self) -> None:
        """Count nothing of it in the totals any more."""
        for run in self._runs.values():
            run.release()

    def committing(self) -> list[asyncio.Task[None]]:
        """The committing tasks; each ends when nothing is left to write."""
        return [run.committing for run in self._runs.values() if run.committing is not None]

    def retire(self, refusal: Refusal) -> None:
        """Refuse waiting and later requests; the batches in flight are the last, see `committing`."""
        self._closed = refusal
        for run in self._runs.values():
            run.retire(refusal)

    def halt(self, refusal: Refusal) -> None:
        """End everything at once; publish nothing more. The caller cancels the tasks in `committing`."""
        self._closed = refusal
        for run in self._runs.values():
            run.halt(refusal)

    def _run(self, run_id: str) -> RunStore:
        if self._closed is not None:
            raise self._closed(run_id)
        self._check_owned(run_id)
        if self._admission.writable_round(run_id) is None:
            raise RunNotFound(run_id)
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = self._open_run(RunSpaces(run_id))
        run.check_whole()
        return run

    def _reading(self, run_id: str, round: int) -> RunStore:
        run = self._run(run_id)
        run.spaces.check_round(round, run.current_round())
        return run

    def _drop_when_idle(self, run_id: str, run: RunStore) -> None:
        """Drop a run that does not exist, once nothing of it is left to write; it may come again before."""
        if run.committing is not None:
            run.committing.add_done_callback(lambda _: self._drop_when_idle(run_id, run))
        elif self._admission.writable_round(run_id) is None and self._runs.get(run_id) is run:
            del self._runs[run_id]


def check_reply_size(values: Sequence[bytes]) -> None:
    """Raise AnswerTooLarge if values do not fit into one response."""
    total = fitting = 0
    for value in values:
        total += len(value) + FRAME_BYTES
        fitting += total <= MAX_MULTI_BYTES
    if fitting < len(values):
        raise AnswerTooLarge(len(values), total, MAX_MULTI_BYTES, fitting)
