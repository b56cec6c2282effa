"""Entries for journals."""

from __future__ import annotations

from rallypoint.rendezvous.codec import encode_record
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.store.ports import StoreChange
from rallypoint.rendezvous.v1.journal_pb2 import JournalRecord


def record(revision: int, run_id: str = "run", padding: int = 0) -> JournalRecord:
    """Record `revision` of a run; `padding` bytes larger than it needs to be."""
    fact = facts.NodeJoined(f"node{revision}", revision, "x" * padding, 2, "trainer")
    return encode_record(run_id, revision, fact, 1.7e9)


def change(key: str, value: bytes | None, round_: int = 1, run_id: str = "run") -> StoreChange:
    """A change of the store."""
    return StoreChange(run_id, round_, key, value)
