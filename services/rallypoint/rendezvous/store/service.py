"""The store of all runs: writes in batches, one at a time per run, and nothing told before it is durable."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import structlog

from rallypoint.rendezvous.store.core import Draft, RunSpaces, StoreLimits
from rallypoint.rendezvous.store.ports import StoreChange, StoreJournal
from rallypoint.rendezvous.store.refusals import (
    Draining,
    JournalFailed,
    KeyWaitTimedOut,
    RoundOver,
    RunNotFound,
    StoreBusy,
    StoreRefusal,
)
from rallypoint.rendezvous.store.waiting import Waiting
from rallypoint.rendezvous.store.writes import Write, decide

T = TypeVar("T")

# Who waits in a space is told the value that ends the waiting, or why there will be none.
_Told: TypeAlias = "asyncio.Future[bytes | StoreRefusal]"
_SpaceWaiting: TypeAlias = Waiting[_Told]

_log = structlog.get_logger("rallypoint.rendezvous.store")

# Deletions of rounds that are over go to the journal so many at a time: they must not hold up a write.
_SWEEP = 1_000
# When to come back after STORE_BUSY: about the time of a few commits on a slow disk. Seconds.
_BUSY_RETRY = 0.1


@dataclass(slots=True, eq=False)
class _Pending:
    """A write that waits for its commit."""

    write: Write[Any]
    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Run:
    """One run: what is durable, who waits for keys of which space, and what is to be written."""

    spaces: RunSpaces
    waiting: dict[int, _SpaceWaiting] = field(default_factory=dict)
    queue: list[_Pending] = field(default_factory=list)
    queued_bytes: int = 0
    obsolete: list[StoreChange] = field(default_factory=list)
    committing: asyncio.Task[None] | None = None


class StoreService:
    """The store of all runs.

    At most one batch of a run is being committed; what arrives meanwhile makes up the next. So a batch is
    decided on what is durable and on nothing else, and one that fails leaves nothing behind. Batches of
    several runs share the journal's commits.

    Readers see what is durable. Whoever waits is told by the write that ends the waiting.
    """

    def __init__(
        self,
        journal: StoreJournal,
        current_round: Callable[[str], int | None],
        entries: Iterable[StoreChange] = (),
        *,
        limits: StoreLimits | None = None,
        on_journal_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        """Build the store from what its journal holds.

        Args:
            journal: Where writes become durable.
            current_round: The one round of a run whose workers may write, 0 before the first; None: there is no
                such run.
            entries: What the journal holds. Entries of rounds that are over are left out.
            limits: Bounds of each run.
            on_journal_failure: Told what the journal raised: it takes no more, so the process must start again.
        """
        self._journal = journal
        self._current_round = current_round
        self._limits = limits or StoreLimits()
        self._on_journal_failure = on_journal_failure
        self._runs: dict[str, _Run] = {}
        self._draining = False
        by_run: dict[str, list[StoreChange]] = {}
        for entry in entries:
            by_run.setdefault(entry.run_id, []).append(entry)
        for run_id, of_run in by_run.items():
            run = self._runs[run_id] = _Run(RunSpaces.restore(run_id, of_run))
            run.obsolete += run.spaces.forget_rounds_before(current_round(run_id) or 0)

    async def write(self, run_id: str, write: Write[T]) -> T:
        """Carry a write out; return its answer when it is durable.

        Cancelling the caller leaves the outcome unknown.

        Raises:
            StoreRefusal: It was refused; JournalFailed leaves the outcome unknown.
        """
        run = self._run(run_id)
        # Checked again when it is decided; here, so that a hopeless write doesn't wait for a commit.
        current_round = self._round_of(run_id)
        run.spaces.check_round(write.round, current_round)
        run.spaces.check_round(write.writer_round, current_round)
        if run.queue and run.queued_bytes + write.queued_bytes > self._limits.queued_bytes:
            raise StoreBusy(run_id, run.queued_bytes, _BUSY_RETRY)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        run.queue.append(_Pending(write, answer))
        run.queued_bytes += write.queued_bytes
        self._start_committing(run)
        return await answer

    async def get(self, run_id: str, round: int, key: str, timeout: float) -> bytes:
        """Return the value of a key, waiting for it up to `timeout` seconds.

        Raises:
            StoreRefusal: KeyWaitTimedOut, or the run, its round or the service ended.
        """
        run = self._reading(run_id, round)
        value = run.spaces.value(round, key)
        return await self._told(run, round, [key], timeout) if value is None else value

    async def wait(self, run_id: str, round: int, keys: Sequence[str], timeout: float) -> None:
        """Return when all keys are there, waiting up to `timeout` seconds.

        Raises:
            StoreRefusal: KeyWaitTimedOut, or the run, its round or the service ended.
        """
        run = self._reading(run_id, round)
        if run.spaces.missing(round, keys):
            await self._told(run, round, keys, timeout)

    def check(self, run_id: str, round: int, keys: Sequence[str]) -> bool:
        """Return whether all keys are there."""
        return not self._reading(run_id, round).spaces.missing(round, keys)

    def list_keys(self, run_id: str, round: int, prefix: str, after: str, count: int) -> list[str]:
        """Return the first `count` keys that begin with `prefix` and come after `after`, by code points."""
        return self._reading(run_id, round).spaces.keys(round, prefix, after, count)

    def forget_rounds_before(self, run_id: str, round: int) -> None:
        """Drop all rounds before `round`, which is durably final; end who waits in them."""
        run = self._runs.get(run_id)
        if run is None:
            return
        run.obsolete += run.spaces.forget_rounds_before(round)
        for old in [old for old in run.waiting if 0 < old < round]:
            self._end_waiting(run.waiting.pop(old), RoundOver(run_id, old, round))
        if run.obsolete:
            self._start_committing(run)

    async def drain(self) -> None:
        """Take no more requests, end all waiting with Draining, and return when what was taken is durable."""
        self._draining = True
        for run in self._runs.values():
            for waiting in run.waiting.values():
                self._end_waiting(waiting, Draining())
            run.waiting.clear()
        commits = [run.committing for run in self._runs.values() if run.committing is not None]
        await asyncio.gather(*commits)

    def _run(self, run_id: str) -> _Run:
        if self._draining:
            raise Draining
        self._round_of(run_id)
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = _Run(RunSpaces(run_id))
        return run

    def _round_of(self, run_id: str) -> int:
        current_round = self._current_round(run_id)
        if current_round is None:
            raise RunNotFound(run_id)
        return current_round

    def _reading(self, run_id: str, round: int) -> _Run:
        run = self._run(run_id)
        run.spaces.check_round(round, self._round_of(run_id))
        return run

    async def _told(self, run: _Run, round: int, keys: Sequence[str], timeout: float) -> bytes:
        """Wait until all keys are there; return the value that was set last of them."""
        missing = run.spaces.missing(round, keys)
        if timeout <= 0:
            raise KeyWaitTimedOut(run.spaces.run_id, missing, timeout)
        waiting = run.waiting.setdefault(round, Waiting())
        told: _Told = asyncio.get_running_loop().create_future()
        waiter = waiting.add(keys, missing, told)
        try:
            await asyncio.wait([told], timeout=timeout)
        finally:
            waiting.discard(waiter)
            if not waiting and run.waiting.get(round) is waiting:
                del run.waiting[round]
        if not told.done():
            still_missing = [key for key in keys if key in waiter.missing]
            raise KeyWaitTimedOut(run.spaces.run_id, still_missing, timeout)
        outcome = told.result()
        if isinstance(outcome, StoreRefusal):
            raise outcome
        return outcome

    def _end_waiting(self, waiting: _SpaceWaiting, refusal: StoreRefusal) -> None:
        for waiter in waiting:
            waiting.discard(waiter)
            waiter.told.set_result(refusal)

    def _start_committing(self, run: _Run) -> None:
        if run.committing is None:
            run.committing = asyncio.get_running_loop().create_task(self._commit(run))

    async def _commit(self, run: _Run) -> None:
        """Commit batch after batch until nothing is left to write."""
        try:
            while run.queue or run.obsolete:
                batch, run.queue, run.queued_bytes = run.queue, [], 0
                swept, run.obsolete = run.obsolete[:_SWEEP], run.obsolete[_SWEEP:]
                await self._commit_batch(run, batch, swept)
        finally:
            run.committing = None

    async def _commit_batch(self, run: _Run, batch: list[_Pending], swept: list[StoreChange]) -> None:
        draft = Draft(run.spaces, self._limits)
        # A write whose caller has gone is left out: its outcome is unknown to the caller anyway.
        writes = [pending for pending in batch if not pending.answer.done()]
        try:
            answers = [self._decide(draft, pending.write) for pending in writes]
            values, records = draft.values(), draft.records()
            failure = await self._append(values + records + swept)
            if failure is None:
                # The batch is durable. No await until all are told: no reader sees half of it.
                self._apply(run, draft.steps(), records)
                self._sweep_late(run, values + records)
            for pending, answer in zip(writes, answers, strict=True):
                _settle(pending.answer, failure or answer)
        finally:
            # Whatever went wrong here, nobody waits for ever.
            for pending in writes:
                pending.answer.cancel()

    async def _append(self, entries: list[StoreChange]) -> JournalFailed | None:
        if not entries:
            return None
        try:
            await self._journal.append(entries)
        except Exception as error:
            _log.error(
                "store.journal_failed", run_id=entries[0].run_id, entries=len(entries), error=str(error)
            )
            self._on_journal_failure(error)
            return JournalFailed(str(error))
        return None

    def _decide(self, draft: Draft, write: Write[Any]) -> object:
        """Return the write's answer, or why it was refused."""
        try:
            return decide(draft, write, self._round_of(draft.run.run_id))
        except StoreRefusal as refusal:
            return refusal

    def _apply(self, run: _Run, steps: list[StoreChange], records: list[StoreChange]) -> None:
        """Take over what is durable, and tell whom it concerns, in the order of the writes."""
        for step in steps:
            run.spaces.apply(step)
            waiting = run.waiting.get(step.round)
            if waiting is None:
                continue
            if step.value is None:
                waiting.key_deleted(step.key)
                continue
            for waiter in waiting.key_set(step.key):
                waiter.told.set_result(step.value)
        for record in records:
            run.spaces.apply(record)

    def _sweep_late(self, run: _Run, entries: list[StoreChange]) -> None:
        """Mark entries of a round that ended while they were committed: the journal mustn't keep them."""
        late = [entry for entry in entries if 0 < entry.round < run.spaces.oldest_round]
        run.obsolete += [replace(entry, value=None) for entry in late]


def _settle(future: asyncio.Future[Any], outcome: object) -> None:
    if future.done():  # its caller has gone
        return
    if isinstance(outcome, StoreRefusal):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
