"""What a journal has of a run, held against what its nodes and operators were told."""

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
    """A durable fact, and when that was by the server's wall clock (unix seconds)."""

    revision: int
    time: float
    fact: facts.Fact


@dataclass(slots=True)
class Chronicle:
    """A run's durable facts, from the first one on, of which the ledger has approved.

    Attributes:
        entries: The facts.
        starts: When each server that wrote them was started, Unix seconds; the one before was dead by then.
        ledger: What has approved.
    """

    entries: Sequence[Entry]
    starts: Sequence[float] = ()
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        """Have the ledger look at all of them.

        Raises:
            Violation: They break an invariant by themselves: a round number given out twice, for one.
        """
        # Servers tell durations by another clock than the one that dates the facts.
        self.ledger.inexact = 0.01
        starts = deque(self.starts)
        for entry in self.entries:
            while starts and starts[0] <= entry.time:
                self.ledger.server_started(starts.popleft())
            self.ledger.record(entry.revision, entry.fact, entry.time)

    def check_told(self, node_id: str, told: Iterable[Told]) -> None:
        """Whether all that a node was told is in the journal, word for word, and in an order that only grows.

        Raises:
            Violation: It was told what is not, or not in order.
        """
        last = 0
        for lease, update in told:
            require(update.revision >= last, "revisions only grow")
            last = update.revision
            self.ledger.check_told(update)
            self.ledger.check_assignment(node_id, lease, update)

    def check_admissions(self, node_id: str, leases: Iterable[int]) -> None:
        """Whether a node that was given these leases has them in the journal.

        Raises:
            Violation: The journal knows nothing of one.
        """
        known = {
            fact.lease
            for fact in self._facts()
            if isinstance(fact, facts.NodeJoined) and fact.node_id == node_id
        }
        require(known.issuperset(leases), f"a lease that {node_id} was given is durable")

    def check_departures(self, node_id: str, leases: Iterable[int]) -> None:
        """Whether a node that gave these leases back is known to have.

        Raises:
            Violation: The journal knows nothing of one.
        """
        lease, left = 0, set()
        for fact in self._facts():
            if isinstance(fact, facts.NodeJoined) and fact.node_id == node_id:
                lease = fact.lease
            if isinstance(fact, facts.NodeLeft) and fact.node_id == node_id:
                left.add(lease)
        require(left.issuperset(leases), f"a leaving that {node_id} was told is done, is durable")

    def check_restarts(self, ended_rounds: Iterable[int]) -> None:
        """Whether the rounds that an operator was told have ended for a restart, have.

        Raises:
            Violation: The journal knows nothing of one.
        """
        ended = {fact.end.round for fact in self._facts() if isinstance(fact, facts.RoundEnded)}
        requested = {fact.round for fact in self._facts() if isinstance(fact, facts.RestartRequested)}
        require((ended & requested).issuperset(ended_rounds), "a restart that was answered is durable")

    def counts(self) -> Counter[str]:
        """How many facts of each kind there are."""
        return Counter(type(fact).__name__ for fact in self._facts())

    def longest_without_final(self) -> float:
        """The longest time from the end of a FINAL round to the next one, seconds."""
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
    """Whether all that were told of a round were told of the same one, and no two of the same rank.

    It looks at nothing but what nodes were told, so it holds whatever the journal says.

    Args:
        told: What nodes were told, each with its name.

    Raises:
        Violation: They were not.
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
    """That of the last durable fact of the nodes' run, in a journal that no process holds; 0: there is none."""
    with reading(journal) as connection:
        (revision,) = connection.execute(
            "SELECT max(revision) FROM record WHERE run_id = ?", (RUN,)
        ).fetchone()
    return int(revision or 0)


async def read_chronicle(server: MortalServer) -> Chronicle:
    """The run of the nodes, as the journal of a server has it that does not run.

    Raises:
        JournalError: It can't be opened.
        Violation: It breaks an invariant by itself.
    """
    file = SqliteJournal(server.journal)
    recovered = await file.open()
    await file.close()
    entries = []
    for record in recovered.records:
        if record.run_id == RUN:
            decoded = DecodedRecord(record.content)
            entries.append(Entry(record.revision, to_seconds(decoded.time), decoded.fact()))
    return Chronicle(entries, server.starts)
