"""From what a journal held to the runs as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rallypoint.rendezvous.codec import decode_record, from_message
from rallypoint.rendezvous.core import leases
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.snapshot import RunSnapshot, restore
from rallypoint.rendezvous.core.state import RunState
from rallypoint.rendezvous.gradual import Work
from rallypoint.rendezvous.history import History
from rallypoint.rendezvous.hosted_run import HostedRun
from rallypoint.rendezvous.journal.journal import JournalError, Record, Recovered
from rallypoint.rendezvous.v1 import journal_pb2


@dataclass(frozen=True, slots=True)
class Numbers:
    """The last numbers that a run gave out."""

    revision: int = 0
    round: int = 0


def recover_runs(
    recovered: Recovered,
    new_history: Callable[[], History],
    now: float,
    to_wall: float = 0.0,
    least_lease: float = leases.LEAST_TERM_AFTER_RESTART,
) -> Work[tuple[dict[str, HostedRun], dict[str, Numbers]]]:
    """Every run as the journal has it, and the numbers of those that expired. Gradually, record by record.

    Args:
        recovered: What the journal held.
        new_history: Makes the history of a run.
        now: Seconds of the server's monotonic clock.
        to_wall: What makes a time of its wall clock, unix seconds, out of that, when added.
        least_lease: How long a lease lives at least from now on, seconds.

    Raises:
        JournalError: A record is missing, or of a newer version.
    """
    runs: dict[str, HostedRun] = {}
    expired: dict[str, Numbers] = {}
    try:
        for checkpoint in recovered.checkpoints:
            snapshot = from_message(journal_pb2.RunSnapshot.FromString(checkpoint.content), RunSnapshot)
            if snapshot.forgotten:
                expired[checkpoint.run_id] = Numbers(snapshot.revision, snapshot.round)
            else:
                runs[checkpoint.run_id] = HostedRun(
                    restore(snapshot, now, to_wall), new_history(), checkpoint=snapshot.revision
                )
            yield
        for record in recovered.records:
            run = runs.get(record.run_id)
            if run is None:
                numbers = expired.get(record.run_id, Numbers())
                state = RunState(record.run_id, revision=numbers.revision, round=numbers.round)
                run = runs[record.run_id] = HostedRun(state, new_history(), checkpoint=numbers.revision)
            _fold(run, record, now, to_wall)
            yield
    except (ValueError, DecodeError) as error:
        raise JournalError(f"the journal can't be read by this version: {error}") from error
    for run in runs.values():
        run.recorded = run.state.revision
        run.keep_writable_round()
        leases.restart_leases(run.state, now, least_lease)
        yield
    return runs, expired


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
