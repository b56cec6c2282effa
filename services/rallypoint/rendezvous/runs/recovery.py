"""From what a journal held to the runs as they were."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rallypoint.rendezvous.base.cooperative import Work
from rallypoint.rendezvous.core import apply as leases
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.snapshot import RunSnapshot, has_budgets, numbers_only, restore
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.journal.journal import MARK, Entry, Journal, JournalError, Record, Recovered
from rallypoint.rendezvous.runs.codec import NewerVersion, decode_record, from_message
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.runs.run import HostedRun
from rallypoint.rendezvous.v1 import journal_pb2


@dataclass(frozen=True, slots=True)
class Numbers:
    """The last numbers that a run, or any of several, gave out."""

    revision: int = 0
    round: int = 0

    def with_those(self, other: Numbers | RunSnapshot | RunState) -> Numbers:
        """Return the greater ones."""
        return Numbers(max(self.revision, other.revision), max(self.round, other.round))


@dataclass(frozen=True, slots=True)
class RecoveredRuns:
    """What a recovery makes of a journal.

    Attributes:
        runs: The runs.
        mark: No run that was forgotten went beyond these numbers, whatever its name: new runs begin there.
        left: Runs that were forgotten, and of which the journal still has something, which is of no use.
        broken: Runs of which no state could be made, and why.
        budgets: What outlived runs that go on, where that is more than their numbers.
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
    """Every run as the journal has it, gradually. A run that can't be made of what is kept of it is set aside.

    Args:
        recovered: What the journal held.
        new_history: Makes the history of a run.
        now: Seconds of the server's monotonic clock.
        to_wall: What makes a time of its wall clock, unix seconds, out of that, when added.
        least_lease: How long a lease lives at least from now on, seconds.

    Raises:
        JournalError: A record is missing or damaged, or something is of a newer version.
    """
    runs: dict[str, HostedRun] = {}
    expired: dict[str, RunSnapshot] = {}
    mark = Numbers()
    broken: dict[str, Exception] = {}

    @contextmanager
    def of_run(run_id: str) -> Iterator[None]:
        """Set a run aside that can't be made; nothing of it is looked at again."""
        try:
            yield
        except JournalError:
            raise  # it is damaged: what it holds of other runs can't be trusted either
        except Exception as error:
            if run_id == MARK or isinstance(error, NewerVersion | DecodeError):
                raise JournalError(f"the journal can't be read by this version: {error}") from error
            broken[run_id] = error
            if (run := runs.pop(run_id, None)) is not None:
                run.history.clear()

    for checkpoint in recovered.checkpoints:
        with of_run(checkpoint.run_id):
            snapshot = from_message(journal_pb2.RunSnapshot.FromString(checkpoint.content), RunSnapshot)
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
        return  # the checkpoint has it already; it is kept for people
    due = run.state.revision + 1
    if record.revision != due:
        raise JournalError(
            f"the journal is damaged: run {record.run_id!r} has no record {due}; restore it from a backup, or "
            "start without it"
        )
    message = journal_pb2.JournalRecord.FromString(record.content)
    apply(run.state, decode_record(message), now, message.time.ToNanoseconds() / 1e9 - to_wall)


# ---- A journal that can be asked to wait for what is on its way to it.


class TrackedJournal:
    """A journal that others can read too, who may see a commit before its owner has learned that it was made.

    So an owner that answers from memory could tell what was, after somebody else told what is. It doesn't if it first
    waits, with `settled`, for the commits under way: what one of them brought is in memory then.
    """

    def __init__(self, journal: Journal) -> None:
        """Track what is appended to `journal`."""
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
            # Whoever appended goes on in this very step of the event loop, and takes over what is durable; those who
            # wait for it come after.
            self._under_way.discard(ended)
            ended.set_result(None)

    async def close(self) -> None:
        """See `Journal.close`."""
        await self._journal.close()

    async def settled(self) -> None:
        """Return when each append that is under way has ended, well or not."""
        if self._under_way:
            await asyncio.wait([*self._under_way])
