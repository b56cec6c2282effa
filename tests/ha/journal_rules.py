"""Check the facts in etcd at the end against the rules of the core, with the checker of its random histories."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

from ha.findings import Finding, Wrong
from ha.history import Fact, History, Told
from ha.invariants import Message
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import Ledger, Violation

# The clocks of replicas differ, and the nemesis sets them: so `Ledger` gets facts that are ages apart, and settings
# with which it does not trust clocks.
_AGES = 1e9

_T = TypeVar("_T", Fact, Told)


def check_journal(history: History) -> list[Finding]:
    """Return the violations in the facts of every run, and in the reports to its nodes and watchers."""
    told = _by_run(history.of(Told))
    return [
        finding
        for run_id, facts in _by_run(history.of(Fact)).items()
        if (finding := _check_run(run_id, facts, told[run_id])) is not None
    ]


def _check_run(run_id: str, facts: Iterable[Fact], told: Iterable[Told]) -> Finding | None:
    ledger = Ledger()
    ledger.inexact, ledger.clock_jumps = 1.0, math.inf
    for fact in facts:
        try:
            recorded = DecodedRecord(bytes.fromhex(fact.content)).fact()
            ledger.record(fact.revision, recorded, fact.revision * _AGES)
        except Violation as violation:
            return Finding(Wrong.OUT_OF_ORDER, run_id, f"of the facts in the journal: {violation}", (fact,))
    for entry in told:
        update = Message(entry).update
        try:
            ledger.check_told(update)
            if isinstance(update, pb.NodeUpdate):
                ledger.check_assignment(entry.node_id, entry.lease, update)
        except Violation as violation:
            return Finding(Wrong.NOT_DURABLE, run_id, f"of what was told: {violation}", (entry,))
    return None


def _by_run(entries: Iterable[_T]) -> dict[str, list[_T]]:
    by_run: dict[str, list[_T]] = defaultdict(list)
    for entry in entries:
        by_run[entry.run_id].append(entry)
    return by_run
