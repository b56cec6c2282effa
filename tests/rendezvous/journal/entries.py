"""Entries for journals."""

from __future__ import annotations

from rallypoint.rendezvous.base.entries import StoreChange
from rallypoint.rendezvous.journal.journal import Checkpoint, Forgotten, Record


def record(revision: int, run_id: str = "run", padding: int = 0) -> Record:
    """Record `revision` of a run; `padding` bytes larger than it needs to be."""
    return Record(run_id, revision, b"fact %d\x00\xff" % revision + b"x" * padding)


def checkpoint(revision: int, keep_from: int, run_id: str = "run") -> Checkpoint:
    """The state of a run after record `revision`; records from `keep_from` on are kept."""
    return Checkpoint(run_id, revision, b"state %d\x00\xff" % revision, keep_from)


def forgotten(revision: int, run_id: str = "run") -> Forgotten:
    """The end of all that is kept of a run but this."""
    return Forgotten(run_id, revision, b"rest %d\x00\xff" % revision)


def change(key: str, value: bytes | None, round_: int = 1, run_id: str = "run") -> StoreChange:
    """A change of the store."""
    return StoreChange(run_id, round_, key, value)
