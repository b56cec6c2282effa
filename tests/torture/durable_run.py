"""Compares the journal of a run with the updates that its nodes and operators received."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.sqlite import SqliteJournal
from rallypoint.rendezvous.journal.sqlite_reading import reading
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rendezvous.core.ledger import Ledger, require
from torture.mortal_server import MortalServer
from torture.tormented_node import RUN, Told


@dataclass(frozen=True, slots=True)
class Entry:
    """A durable fact, and its time by the server's wall clock (Unix seconds)."""

    revision: int
    time: float
    fact: facts.Fact


@dataclass(slots=True)
class DurableRun:
    """A run's durable facts, from the first one on, checked for invariants.

    Attributes:
        entries: The facts.
        starts: Start times of the servers that wrote them, Unix seconds; the one before was dead by then.
        `ledger`: The invariants, with the facts applied.
    """

    entries: Sequence[Entry]
    starts: Sequence[float] = ()
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        """Check all facts.

        Raises:
            Violation: They break an invariant by themselves, such as a round number used twice.
        """
        # Servers measure durations by another clock than the one that dates the facts.
        self.ledger.inexact = 0.01
        starts = deque(self.starts)
        for entry in self.entries:
            while starts and starts[0] <= entry.time:
                self.ledger.server_started(starts.popleft())
            self.ledger.record(entry.revision, entry.fact, entry.time)

    def check_told(self, node_id: str, told: Iterable[Told]) -> None:
        """Check that all updates of a node are exactly in the journal, in an order that only grows.

        Raises:
            Violation: An update is not in the journal, or not in order.
        """
        last = 0
        for lease, update in told:
            require(update.revision >= last, "revisions only grow")
            last = update.revision
            self.ledger.check_told(update)
            self.ledger.check_assignment(node_id, lease, update)

    def check_admissions(self, node_id: str, leases: Iterable[int]) -> None:
        """Check that the journal has all leases that were granted to a node.

        Raises:
            Violation: A lease is not in the journal.
        """
        known = {
            fact.lease
            for fact in self._facts()
            if isinstance(fact, facts.NodeJoined) and fact.node_id == node_id
        }
        require(known.issuperset(leases), f"a lease that {node_id} was given is durable")

    def check_departures(self, node_id: str, leases: Iterable[int]) -> None:
        """Check that the journal has all leases that a node gave back.

        Raises:
            Violation: A departure is not in the journal.
        """
        lease, left = 0, set()
        for fact in self._facts():
            if isinstance(fact, facts.NodeJoined) and fact.node_id == node_id:
                lease = fact.lease
            if isinstance(fact, facts.NodeLeft) and fact.node_id == node_id:
                left.add(lease)
        require(left.issuperset(leases), f"a leaving that {node_id} was told is done, is durable")

    def check_restarts(self, ended_rounds: Iterable[int]) -> None:
        """Check that the rounds reported to an operator as ended for a restart have ended for it.

        Raises:
            Violation: A restart is not in the journal.
        """
        ended = {fact.end.round for fact in self._facts() if isinstance(fact, facts.RoundEnded)}
        requested = {fact.round for fact in self._facts() if isinstance(fact, facts.RestartRequested)}
        require((ended & requested).issuperset(ended_rounds), "a restart that was answered is durable")

    def counts(self) -> Counter[str]:
        """Return the number of facts of each kind."""
        return Counter(type(fact).__name__ for fact in self._facts())

    def longest_without_final(self) -> float:
        """Return the longest time from the end of a FINAL round to the next one, in seconds."""
        longest, since = 0.0, None
        final = False
        for entry in self.entries:
            if isinstance(entry.fact, facts.RoundFinalized):
                longest = max(longest, entry.time - since) if since is not None else longest
                final, since = True, None
            if isinstance(entry.fact, facts.RoundEnded) and final:
                final, since = False, entry.time
        return longest

    def _facts(self) -> Iterable[facts.Fact]:
        return (entry.fact for entry in self.entries)


def check_one_membership_a_round(told: Iterable[tuple[str, Told]]) -> None:
    """Check that all nodes received the same membership of each round, and no two the same rank.

    It uses only the updates of nodes, so it holds for any journal.

    Args:
        `told`: The updates of nodes, each with its node's name.

    Raises:
        Violation: They did not.
    """
    sizes: dict[int, tuple[int, int, int, str]] = {}
    holders: dict[tuple[int, int], tuple[str, int]] = {}
    bases: dict[tuple[int, int], int] = {}
    ports: dict[int, int] = {}
    for node_id, (lease, update) in told:
        if not update.HasField("assignment"):
            continue
        place = update.assignment
        size = (place.group_world_size, place.world_size, place.fencing_token, place.master_address)
        require(sizes.setdefault(place.round, size) == size, f"round {place.round} is one membership")
        require(0 <= place.group_rank < place.group_world_size, "group ranks are 0 … n-1")
        rank = (place.round, place.group_rank)
        require(
            holders.setdefault(rank, (node_id, lease)) == (node_id, lease),
            f"rank {place.group_rank} of round {place.round} is one node's",
        )
        require(bases.setdefault(rank, place.base_rank) == place.base_rank, "a place does not change")
        if update.phase == pb.PHASE_FINAL:
            port = ports.setdefault(place.round, place.master_port)
            require(port == place.master_port, "all are told the same port")
    tokens = [sizes[round_][2] for round_ in sorted(sizes)]
    require(tokens == sorted(set(tokens)), "fencing tokens grow from round to round")


def last_revision(journal: Path) -> int:
    """Return the last durable revision of the nodes' run, in a journal that no process holds; 0: there is none."""
    with reading(journal) as connection:
        (revision,) = connection.execute(
            "SELECT max(revision) FROM record WHERE run_id = ?", (RUN,)
        ).fetchone()
    return int(revision or 0)


async def read_durable_run(server: MortalServer) -> DurableRun:
    """Return the run of the nodes from the journal of a stopped server.

    Raises:
        JournalError: The journal can't be opened.
        Violation: The run breaks an invariant.
    """
    file = SqliteJournal(server.journal)
    recovered = await file.open()
    await file.close()
    entries = []
    for record in recovered.records:
        if record.run_id == RUN:
            decoded = DecodedRecord(record.content)
            entries.append(Entry(record.revision, to_seconds(decoded.time), decoded.fact()))
    return DurableRun(entries, server.starts)
