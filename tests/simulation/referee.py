"""The referee of a whole cluster: it checks invariants over the journal, the wire, the hosts and the workers.

For each run it keeps the `Ledger` of the core's histories, which checks durable facts and the updates sent about them.
It adds checks that need a cluster: overlap of workers, writes by fencing token, and responses sent to clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from google.protobuf.message import Message

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import Outcome, Phase
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.journal import MARK, Forgotten, Record
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError, decode
from rendezvous.core.ledger import Ledger, Violation, require
from simulation.clockwork import SKEW
from simulation.losses import Losses
from simulation.network import Link
from simulation.store_truth import StoreTruth
from simulation.terms import Terms
from simulation.wire import ServerCall, Status

# Virtual seconds within which a running server sends durable facts.
AT_ONCE = 0.5
# With a fast clock, a server's timeout takes fewer of the world's seconds: by less than this factor.
_FAST_CLOCK = 1 + 2 * SKEW
# The largest difference between the clocks of a server, an agent and the world, as a fraction; and the error of a wall
# clock that is set, in seconds.
_INEXACT = 0.15
_CLOCK_JUMPS = 2.5
# Codes that our server must never send, or that no request of our clients justifies.
_NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
# Refusals that end the membership of a node that was admitted.
_FINAL = ("RUN_CLOSED", "NODE_EVICTED", "LEASE_LOST", "SETTINGS_DIFFER", "JOIN_TIMED_OUT")


@dataclass(slots=True)
class Subject:
    """The node of a server's stream, and the state that was sent to it."""

    run_id: str
    node_id: str
    lease: int = 0
    revision: int = 0
    admitted: bool = False
    # True if it stays in a closed run until its workers are gone.
    stays: bool = False
    # When a service received a message from the node on this stream, or sent its lease.
    sign_at: float = -math.inf


class Agent(Protocol):
    """The agent that owns a group of workers."""

    link: Link


@dataclass(eq=False, slots=True)
class Group:
    """The workers of one round on one host."""

    run_id: str
    node_id: str
    lease: int
    round: int
    fencing_token: int
    agent: Agent
    token: bytes


class RunLedger(Ledger):
    """The `Ledger` of a run, with the way in which leases ended."""

    def __init__(self) -> None:
        super().__init__()
        self.inexact, self.clock_jumps = _INEXACT, _CLOCK_JUMPS
        # Leases whose nodes reported that none of their workers run, or must have made sure of it.
        self.given_back: set[tuple[str, int]] = set()
        self.ended: set[tuple[str, int]] = set()
        # All leases that were ever granted.
        self.given: set[tuple[str, int]] = set()
        self.operator_closes = False
        self.final_rounds: list[int] = []
        # The newest round that is over.
        self.ended_round = 0
        # The newest round whose workers started.
        self.started_round = 0

        # Leases that were held when the run was closed last.
        self.at_end: set[tuple[str, int]] = set()
        self.ever_evicted: set[str] = set()
        self.ever_closed = False
        # The run is over for good, or was until it was forgotten.
        self.over = False

    @property
    def forgotten(self) -> bool:
        """True if the run expired and has not been created again."""
        return self._begins_at > max(1, self.revision)

    def _RunCreated(self, fact: facts.RunCreated) -> None:
        super()._RunCreated(fact)
        self.over = False

    @property
    def evicted(self) -> frozenset[str]:
        """Nodes that an operator evicted."""
        return frozenset(self._evicted)

    def counts_restart_of(self, round_: int) -> bool:
        """Return True if the end of a round counts as a restart."""
        return any(of_round == round_ for of_round, _, _ in self._caused)

    @property
    def phase(self) -> Phase:
        """The phase of the run, by its durable facts."""
        return self._phase

    @property
    def round(self) -> int:
        """The newest round, by the run's durable facts."""
        return self._round

    def record(self, revision: int, fact: facts.Fact, decided_at: float) -> None:
        """Record a durable fact."""
        before = dict(self.leases)
        super().record(revision, fact, decided_at)
        gone = {(node_id, lease) for node_id, lease in before.items() if self.leases.get(node_id) != lease}
        self.ended |= gone
        if isinstance(fact, facts.NodeJoined):
            self.given.add((fact.node_id, fact.lease))
        if isinstance(fact, facts.NodeLeft):
            self.given_back |= gone
        if isinstance(fact, facts.RunClosed):
            self.ever_closed = self.over = True
            self.at_end = set(before.items())
            by_operator = fact.end.outcome is Outcome.CANCELLED
            require(self.operator_closes or not by_operator, "a run is cancelled by an operator only")
        if isinstance(fact, facts.NodeEvicted):
            self.ever_evicted.add(fact.node_id)
        if isinstance(fact, facts.RoundEnded):
            self.ended_round = fact.end.round
        if isinstance(fact, facts.RoundFinalized):
            self.final_rounds.append(fact.round)


@dataclass(slots=True)
class FencedResource:
    """Shared storage that refuses a writer with an older token than it has seen."""

    token: int = 0
    round: int = 0

    def write(self, group: Group) -> bool:
        """Return True if a write is accepted."""
        if group.fencing_token < self.token:
            return False
        require(group.round >= self.round, "no write of a round is taken after one of a newer round")
        self.token, self.round = group.fencing_token, group.round
        return True


@dataclass(slots=True)
class Referee:
    """The checks of a cluster; `violation` is the first that was found."""

    note: Callable[..., None]
    # Schedules a call after a number of virtual seconds.
    later: Callable[..., object]
    # The world's clock, seconds.
    now: Callable[[], float]
    violation: Violation | None = None
    ledgers: dict[str, RunLedger] = field(default_factory=dict)
    resources: dict[str, FencedResource] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    # Streams of nodes that servers have open, in the order of opening.
    streams: dict[ServerCall, None] = field(default_factory=dict)
    # (Run, node, lease) of nodes that sent a leave.
    _left: set[tuple[str, str, int]] = field(default_factory=set)
    terms: Terms | None = None
    # If True, no worker may be stopped or restarted: only the server has faults.
    undisturbed: bool = False
    losses: Losses = field(init=False)
    store: StoreTruth = field(init=False)
    # Called when workers start, with the link of their host; and when they are gone.
    on_started: Callable[[Group, Link], None] = lambda group, link: None
    on_stopped: Callable[[Group], None] = lambda group: None

    def __post_init__(self) -> None:
        self.losses = Losses(self.now, self.later, self._judge)
        self.store = StoreTruth(self.blame, self.note, self._lease_over, self._round_over)

    def _judge(self, judge: Callable[[], None]) -> None:
        with self.judging():
            judge()

    def _lease_over(self, run_id: str, node_id: str, lease: int) -> bool:
        return (node_id, lease) in self.ledger(run_id).ended

    def _round_over(self, run_id: str) -> int:
        return self.ledger(run_id).ended_round

    def ledger(self, run_id: str) -> RunLedger:
        ledger = self.ledgers.get(run_id)
        if ledger is None:
            ledger = self.ledgers[run_id] = RunLedger()
        return ledger

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Record a violation instead of raising it: product code that calls the referee must not catch it."""
        try:
            yield
        except Violation as violation:
            self.blame(violation)

    def blame(self, violation: Violation) -> None:
        """Record a violation; the first is kept."""
        if self.violation is None:
            self.violation = violation
            self.note("VIOLATION", violation)

    def unforeseen(self, what: str) -> None:
        """Report an exception that no code of a process caught."""
        self.blame(Violation(f"nothing fails unforeseen: {what}"))

    def check(self) -> None:
        """Raise the first violation, if there is one."""
        if self.violation is not None:
            raise self.violation

    # ---- the journal

    def durable(self, entry: Record, decided_at: float) -> None:
        """A record became durable; `decided_at`: the virtual second of the decision."""
        record = DecodedRecord(entry.content)
        with self.judging():
            require(
                (record.run_id, record.revision) == (entry.run_id, entry.revision),
                "a record says what run and revision it is of",
            )
            fact = record.fact()
            self.note("durable", entry.run_id, entry.revision, fact)
            if self.undisturbed:
                allowed = isinstance(fact, (facts.NodeSucceeded, facts.RunClosed))
                require(allowed, "trouble of the server alone changes no membership")
            ledger = self.ledger(entry.run_id)
            if isinstance(fact, facts.RunCreated) and fact.reopened:
                self._check_gone(entry.run_id, ledger.settings.time_to_live, decided_at)
            ledger.record(entry.revision, fact, decided_at * _FAST_CLOCK)
            self.losses.durable(entry.run_id, ledger, fact, decided_at)
            if isinstance(fact, facts.RunClosed):
                self.store.forget(entry.run_id)  # deleted before the run is reopened
            if isinstance(fact, facts.RoundEnded):
                self.later(AT_ONCE, self._expect_notified, entry.run_id, entry.revision)

    def _check_gone(self, run_id: str, time_to_live: float, decided_at: float) -> None:
        """Check that no node of the closed run sent a message on its stream lately, unless it sent a leave."""
        for call in self.streams:
            subject = call.subject
            held = subject.run_id == run_id and (subject.node_id, subject.lease) in self.ledger(run_id).at_end
            # Left on any stream: the server may not have seen the end of an earlier one.
            left = (run_id, subject.node_id, subject.lease) in self._left
            there = held and subject.admitted and subject.stays and not left
            if there and call.process.alive and not call.done():
                # A sign on another stream does not count: a replica that does not own the run may have refused it.
                fresh = decided_at - subject.sign_at < time_to_live / 2
                require(not fresh, "no run is opened again while a node of it is there")

    def forgotten(self, entry: Forgotten) -> None:
        """A run expired, or a run begins after the numbers of expired ones."""
        self.note("forgotten", entry.run_id, entry.revision)
        if entry.run_id == MARK:
            return
        with self.judging():
            ledger = self.ledger(entry.run_id)
            if ledger.revision == 0 or ledger.forgotten:
                ledger.begin_after(entry.revision)
                return
            require(entry.revision == ledger.revision, "a run is forgotten after its last record")
            ledger.forget()
            self.store.forget(entry.run_id)

    def _expect_notified(self, run_id: str, revision: int) -> None:
        """Check that each node with an open stream to a running server was sent a round's end by now."""
        ledger, again = self.ledger(run_id), False
        for call in list(self.streams):
            subject = call.subject
            if call.done() or not call.process.alive:
                del self.streams[call]
            elif not call.process.awake_for(AT_ONCE):
                again = True
            elif (
                subject.run_id == run_id
                and subject.admitted
                and (subject.node_id, subject.lease) not in ledger.ended
                and not call.blocked
            ):
                with self.judging():
                    require(
                        subject.revision >= revision,
                        "who is connected is told at once that its round is over",
                    )
        if again:
            self.later(AT_ONCE, self._expect_notified, run_id, revision)

    # ---- the wire, at the server

    def heard(self, call: ServerCall, message: Any) -> None:
        """A server receives a message of a client."""
        if not isinstance(message, pb.JoinRequest):
            return
        match message.WhichOneof("message"):
            case "join":
                call.subject = Subject(message.join.run_id, message.join.node_id)
                call.subject.stays = message.join.stays_until_gone
                self.streams[call] = None
            case "resume":
                resume = message.resume
                call.subject = Subject(resume.run_id, resume.node_id, resume.lease, resume.after_revision)
                call.subject.stays = resume.stays_until_gone
                self.streams[call] = None
                self.losses.opened(call)
            case "leave" if call.subject is not None:
                self._left.add((call.subject.run_id, call.subject.node_id, call.subject.lease))
        if self.terms is not None:
            self.terms.heard(call)
        if call.subject is not None and message.WhichOneof("message") != "heartbeat":
            self.note("heard", call.subject.node_id, message)

    def told(self, call: ServerCall, message: Message) -> None:
        """A server sends a message to a client."""
        with self.judging():
            match message:
                case pb.JoinResponse():
                    self.note("told", call.subject.node_id, message)
                    self._judge_answer(call, message)
                case pb.WatchRunResponse():
                    self.ledger(message.run.run_id).check_told(message.run)

    def _judge_answer(self, call: ServerCall, message: pb.JoinResponse) -> None:
        subject = call.subject
        ledger = self.ledger(subject.run_id)
        if message.HasField("lease"):
            lease = message.lease
            held = ledger.leases.get(subject.node_id) == lease.number
            ended = (subject.node_id, lease.number) in ledger.ended
            require(held or ended, "a lease is durable before it is told")
            require(lease.revision <= ledger.revision, "a lease tells a revision that is durable")
            require(subject.lease in (0, lease.number), "who resumes keeps its lease")
            require(lease.revision >= subject.revision, "revisions told on a stream only grow")
            subject.lease, subject.revision, subject.admitted = lease.number, lease.revision, True
            self.losses.opened(call)
            if self.terms is not None:
                self.terms.told(subject)
        if message.HasField("update"):
            update = message.update
            ledger.check_told(update)
            require(update.revision >= subject.revision, "revisions told on a stream only grow")
            subject.revision = update.revision
            self.store.round_ended(subject.run_id, update.last_round_end.round)
            if (subject.node_id, subject.lease) not in ledger.ended:
                ledger.check_assignment(subject.node_id, subject.lease, update)
        if message.HasField("draining"):
            require(message.draining.revision <= ledger.revision, "nothing is told before it is durable")

    def answered(self, call: ServerCall, status: Status) -> None:
        """A server ends a call."""
        code, details, trailing = status
        if code is grpc.StatusCode.OK:
            return
        error = decode(
            grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details)
        )
        if call.subject is not None or error.reason != "RUN_NOT_FOUND":  # onlookers retry until it exists
            self.note("refused", call.subject or call.method, error.reason, details)
        with self.judging():
            require(code not in _NEVER, f"a service never answers {code.name}")
            unexpected = error.reason in ("UNEXPECTED_ERROR", "RUN_BROKEN")
            require(not unexpected, "a service has no unexpected errors")
            if call.subject is None:
                malformed = code is grpc.StatusCode.INVALID_ARGUMENT and "StoreService" in call.method
                require(not malformed, f"what clients of ours ask for is well formed: {details}")
                return
            ledger = self.ledger(call.subject.run_id)
            held = call.subject.lease or int(error.metadata.get("lease", "0"))
            lease = call.subject.node_id, held
            if error.reason in ("LEASE_LOST", "JOIN_TIMED_OUT"):
                # A node that was refused when it joined never received the number of the lease.
                over = lease in ledger.ended or (
                    not held and any(node == lease[0] for node, _ in ledger.ended)
                )
                require(over, f"a lease that stands is honoured: {details}")
            if error.reason == "RUN_CLOSED":
                require(ledger.ever_closed, "a run is closed before that is told")
            if error.reason == "NODE_EVICTED":
                require(call.subject.node_id in ledger.ever_evicted, "a node is evicted before that is told")
            require(error.reason != "REVISION_AHEAD", "no revision is forgotten")

    # ---- nodes and their workers

    def refused(self, run_id: str, node_id: str, lease: int, error: ServiceError) -> None:
        """A node gives up because of a refusal; `lease`: the last that it was granted, 0: none."""
        with self.judging():
            if lease:
                require(error.reason in _FINAL, f"a node that was admitted is not refused for {error.reason}")
            if error.reason == "LEASE_LOST":
                newer = max((held for name, held in self.ledger(run_id).given if name == node_id), default=0)
                require(newer > lease, "an agent gives up a lost lease only to another of its name")

    def unreachable(self, node_id: str, *, admitted: bool) -> None:
        """A node gives up because no service is reachable."""
        with self.judging():
            require(
                not admitted, f"{node_id} was admitted, and waits for its service for as long as it takes"
            )

    def saw(self, run_id: str, node_id: str, before: int, update: pb.NodeUpdate) -> None:
        """A node receives an update; `before` is the last revision it received on this lease."""
        self.note("read", node_id, update)
        with self.judging():
            require(update.revision >= before, "revisions that a node sees only grow")
            require(update.revision <= self.ledger(run_id).revision, "nothing is told before it is durable")

    def confirms(self, agent: object, round_: int) -> None:
        with self.judging():
            mine = [group for group in self.groups if group.agent is agent]
            require(not mine, f"who confirms round {round_} has no workers")

    def started(self, group: Group) -> None:
        """Workers start on a node."""
        self.note("started", group.node_id, group.round)
        with self.judging():
            require(not self.undisturbed, "trouble of the server alone restarts no worker")
            ledger = self.ledger(group.run_id)
            formed = ledger.rounds.get(group.round)
            require(formed is not None, "workers run in a round that is durable")
            assert formed is not None
            require(group.round in ledger.final_rounds, "workers run in a round that was FINAL")
            require(formed.leases.get(group.node_id) == group.lease, "workers run on a participant")
            for other in self.groups:
                if other.run_id == group.run_id:
                    self._judge_overlap(ledger, other, group)
            ledger.started_round = max(ledger.started_round, group.round)
        self.groups.append(group)
        self.on_started(group, group.agent.link)

    def _judge_overlap(self, ledger: RunLedger, other: Group, group: Group) -> None:
        """Check two groups that run at once: of one round, or the older on a host that was lost and may not know it."""
        older = other if other.round < group.round else group
        require(other.agent is not group.agent, "a node runs the workers of one round at a time")
        if other.round == group.round:
            return
        lease = older.node_id, older.lease
        require(
            lease in ledger.ended and lease not in ledger.given_back,
            "workers of two rounds run at once on nodes that were lost only",
        )

    def stopped(self, group: Group) -> None:
        """Workers of a node are gone."""
        self.note("stopped", group.node_id, group.round)
        self.groups.remove(group)
        self.on_stopped(group)

    def writes(self, group: Group, writable_round: int | None) -> None:
        """A worker writes to shared storage, and to the service's store, which accepts writes of one round only."""
        with self.judging():
            ledger = self.ledger(group.run_id)
            if writable_round == group.round:
                current = group.round >= ledger.started_round
                require(current, "the store takes nothing of a round that is over")
            if not self.resources.setdefault(group.run_id, FencedResource()).write(group):
                require(group.round < ledger.started_round, "storage fences off none but stale writers")
                self.note("fenced off", group.node_id, group.round)

    def paused(self, seconds: float) -> None:
        """A process is stopped: if it is the server, its time stands still."""
        for ledger in self.ledgers.values():
            ledger.clock_jumps += seconds

    def drained_late(self, *, excused: bool) -> None:
        """A server's drain timeout passed before its calls ended; `excused`: because of a client, a disk or a pause."""
        with self.judging():
            require(excused, "a server that is told to end has no call left open by mistake")

    def closed_by_operator(self, run_id: str) -> None:
        """An operator received the reply that a run is closed."""
        with self.judging():
            require(self.ledger(run_id).ever_closed, "a run is closed before that is told")
