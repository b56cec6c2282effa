"""Recovery: the runs, restored from the content of a journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rallypoint.rendezvous.base.codec import NewerVersion
from rallypoint.rendezvous.base.cooperative import Work
from rallypoint.rendezvous.core import apply as leases
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.snapshot import RunSnapshot, has_budgets, numbers_only, restore
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.journal.codec import DecodedRecord, decode_snapshot
from rallypoint.rendezvous.journal.journal import MARK, Entry, Journal, JournalError, Record, Recovered
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.runs.run import HostedRun
from rallypoint.rpc.durations import to_seconds


@dataclass(frozen=True, slots=True)
class Numbers:
    """The last numbers that one run, or the furthest of several, gave out."""

    revision: int = 0
    round: int = 0

    def with_those(self, other: Numbers | RunSnapshot | RunState) -> Numbers:
        """Return the greater ones."""
        return Numbers(max(self.revision, other.revision), max(self.round, other.round))


@dataclass(frozen=True, slots=True)
class RecoveredRuns:
    """The result of a recovery.

    Attributes:
        runs: The runs.
        mark: The highest numbers of all forgotten runs: new runs continue from there.
        left: Forgotten runs of which the journal still has entries, which are useless.
        broken: Runs that could not be restored, and the error.
        budgets: Snapshots of runs that may go on, where more than their numbers is left.
    """

    runs: dict[str, HostedRun]
    mark: Numbers
    left: list[str]
    broken: dict[str, Exception]
    budgets: dict[str, RunSnapshot] = field(default_factory=dict)


def recover_runs(
    recovered: Recovered,
    new_history: Callable[[], History],
    now: float,
    to_wall: float = 0.0,
    least_lease: float = leases.LEAST_TERM_AFTER_RESTART,
) -> Work[RecoveredRuns]:
    """Restore every run of a journal, as cooperative work. A run that cannot be restored is set aside.

    Args:
        now: Seconds of the server's monotonic clock.
        to_wall: Offset from that clock to its wall clock (unix time), seconds.
        least_lease: Least remaining time of a lease from now on, seconds.

    Raises:
        JournalError: A record is missing or damaged, or something is of a newer version.
    """
    runs: dict[str, HostedRun] = {}
    expired: dict[str, RunSnapshot] = {}
    mark = Numbers()
    broken: dict[str, Exception] = {}

    @contextmanager
    def of_run(run_id: str) -> Iterator[None]:
        """Set a run aside if the block fails; the rest of its entries is skipped."""
        try:
            yield
        except JournalError:
            raise  # the journal is damaged: its entries of other runs can't be trusted either
        except Exception as error:
            if run_id == MARK or isinstance(error, NewerVersion | DecodeError):
                raise JournalError(f"the journal can't be read by this version: {error}") from error
            broken[run_id] = error
            if (run := runs.pop(run_id, None)) is not None:
                run.history.clear()

    for checkpoint in recovered.checkpoints:
        with of_run(checkpoint.run_id):
            snapshot = decode_snapshot(checkpoint.content)
            if snapshot.forgotten:
                expired[checkpoint.run_id] = snapshot
                mark = mark.with_those(snapshot)
            else:
                runs[checkpoint.run_id] = HostedRun(
                    restore(snapshot, now, to_wall), new_history(), checkpoint=snapshot.revision
                )
        yield
    for record in recovered.records:
        if record.run_id in broken:
            continue
        with of_run(record.run_id):
            run = runs.get(record.run_id)
            if run is None:
                begin = expired.get(record.run_id) or numbers_only(record.run_id, 0, 0)
                state = restore(begin, now, to_wall)
                run = runs[record.run_id] = HostedRun(state, new_history(), checkpoint=begin.revision)
            _fold(run, record, now, to_wall)
        yield
    for run_id, run in [*runs.items()]:
        with of_run(run_id):
            run.recorded = run.state.revision
            run.keep_writable_round()
            leases.restart_leases(run.state, now, least_lease)
        yield
    left = {
        run_id: each
        for run_id, each in expired.items()
        if run_id != MARK and run_id not in runs and run_id not in broken
    }
    budgets = {run_id: each for run_id, each in left.items() if has_budgets(each)}
    return RecoveredRuns(runs, mark, [run_id for run_id in left if run_id not in budgets], broken, budgets)


def _fold(run: HostedRun, record: Record, now: float, to_wall: float) -> None:
    run.history.add(record)
    if record.revision <= run.checkpoint:
        return  # the checkpoint includes it; the record is kept for people
    due = run.state.revision + 1
    if record.revision != due:
        raise JournalError(
            f"the journal is damaged: run {record.run_id!r} has no record {due}; restore it from a backup, or "
            "start without it"
        )
    decoded = DecodedRecord(record.content)
    apply(run.state, decoded.fact(), now, to_seconds(decoded.time) - to_wall)


# ---- A journal with a way to wait for its commits under way.


class TrackedJournal:
    """A journal that other processes can read too: they may see a commit before its owner learns of its success.

    So an owner that answers from memory could report an older state after another process reported a newer one. It
    doesn't if it first waits, with `settled`, for the commits under way: their results are in memory then.
    """

    def __init__(self, journal: Journal) -> None:
        """Track appends to `journal`."""
        self._journal = journal
        self._under_way: set[asyncio.Future[None]] = set()

    async def open(self) -> Recovered:
        """See `Journal.open`."""
        return await self._journal.open()

    async def append(self, entries: Sequence[Entry]) -> None:
        """See `Journal.append`."""
        ended = asyncio.get_running_loop().create_future()
        self._under_way.add(ended)
        try:
            await self._journal.append(entries)
        finally:
            # The caller of `append` goes on in this very step of the event loop, and updates the state in memory; the
            # waiters for it come after.
            self._under_way.discard(ended)
            ended.set_result(None)

    async def close(self) -> None:
        """See `Journal.close`."""
        await self._journal.close()

    async def settled(self) -> None:
        """Return when each append under way has ended, with or without an error."""
        if self._under_way:
            await asyncio.wait([*self._under_way])
