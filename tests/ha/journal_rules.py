"""Whether what lies in etcd at the end keeps the rules of the core: the referee of the random histories looks at it."""

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

# Replicas don't agree on the time, and the nemesis sets their clocks: so the ledger is told that each fact came ages
# after the one before, and that clocks are not to be trusted.
_AGES = 1e9

_T = TypeVar("_T", Fact, Told)


def check_journal(history: History) -> list[Finding]:
    """What is wrong with the facts of every run, and with what its nodes and watchers were told beside them."""
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
