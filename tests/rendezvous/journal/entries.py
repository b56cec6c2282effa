"""Entries for journals."""

from __future__ import annotations

from dataclasses import replace

from rallypoint.journal.v1 import journal_pb2
from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import Checkpoint, Entry, Forgotten, Record


def record(revision: int, run_id: str = "run", padding: int = 0) -> Record:
    """Record `revision` of a run; `padding` bytes larger than it needs to be."""
    return Record(run_id, revision, b"fact %d\x00\xff" % revision + b"x" * padding)


def checkpoint(revision: int, keep_from: int, run_id: str = "run") -> Checkpoint:
    """The state of a run after record `revision`; records from `keep_from` on are kept."""
    return Checkpoint(run_id, revision, b"state %d\x00\xff" % revision, keep_from)


def forgotten(revision: int, run_id: str = "run") -> Forgotten:
    """The entry that replaces everything kept of a run."""
    return Forgotten(run_id, revision, b"rest %d\x00\xff" % revision)


def change(key: str, value: bytes | None, round_: int = 1, run_id: str = "run") -> StoreChange:
    """A change of the store."""
    return StoreChange(run_id, round_, key, value)


def as_written_before(entry: Entry) -> Entry:
    """Return an entry as a version wrote it without restart windows, budgets of nodes and the earliest failure."""
    match entry:
        case Record():
            record = journal_pb2.JournalRecord.FromString(entry.content)
            match record.WhichOneof("fact"):
                case "run_created":
                    record.run_created.settings.ClearField("restart_window")
                    record.run_created.settings.ClearField("restart_backoff")
                    record.run_created.ClearField("incarnation")
                case "worker_failed":
                    record.worker_failed.ClearField("earliest")
                    record.worker_failed.failure.ClearField("age")
                case "round_ended":
                    record.round_ended.ClearField("counted_restarts")
                    record.round_ended.ClearField("quick_restarts")
                case "node_joined":
                    record.node_joined.ClearField("token")
            return replace(entry, content=record.SerializeToString())
        case Checkpoint():
            snapshot = journal_pb2.RunSnapshot.FromString(entry.content)
            snapshot.settings.ClearField("restart_window")
            snapshot.settings.ClearField("restart_backoff")
            snapshot.ClearField("restarts")
            snapshot.ClearField("quick_restarts")
            snapshot.ClearField("failed_workers")
            snapshot.ClearField("former_fencing_token")
            snapshot.ClearField("incarnation")
            for node in snapshot.nodes:
                node.ClearField("token")
            snapshot.failure.ClearField("age")
            if snapshot.phase == journal_pb2.PHASE_FROZEN:
                snapshot.ClearField("failure")  # it was dropped as soon as the next round had its number
            return replace(entry, content=snapshot.SerializeToString())
        case _:
            return entry
