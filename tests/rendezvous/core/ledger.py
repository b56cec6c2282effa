"""The referee of random histories: knows what may never happen, and nothing of how the core decides.

It follows a run by its durable facts and by what is told to nodes and watchers, and holds both against the
invariants of the design. It never looks into a `RunState`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import Outcome, Phase, RoundEndCause, RunSettings, ScaleUpPolicy, Seat
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb


class Violation(AssertionError):
    """An invariant is broken."""


def require(holds: bool, invariant: str) -> None:
    """Raise a `Violation` that names the invariant, unless it holds."""
    if not holds:
        raise Violation(invariant)


@dataclass(slots=True)
class FrozenRound:
    """A round as the journal has it."""

    seats: dict[str, Seat]
    leases: dict[str, int]
    fencing_token: int
    confirmed: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    # When it was decided, seconds, that the round is FINAL, and that the first of it succeeded.
    final_at: float = math.inf
    first_success_at: float = math.inf
    barrier_passed: bool = False


def check_ranks(seats: tuple[Seat, ...], workers: dict[str, tuple[int, str]]) -> None:
    """Group ranks are exactly 0 … n-1, worker ranks partition 0 … world_size-1, and so within every role."""
    require(
        [seat.group_rank for seat in seats] == list(range(len(seats))), "group ranks are 0 … n-1, each once"
    )
    require(len({seat.node_id for seat in seats}) == len(seats), "no node has two seats")
    ranks: list[int] = []
    role_ranks: dict[str, list[int]] = defaultdict(list)
    role_sizes: dict[str, set[int]] = defaultdict(set)
    for seat in seats:
        size, role = workers[seat.node_id]
        require(seat.local_world_size == size, "a seat has the workers that its node joined with")
        ranks.extend(range(seat.base_rank, seat.base_rank + size))
        role_ranks[role].extend(range(seat.base_role_rank, seat.base_role_rank + size))
        role_sizes[role].add(seat.role_world_size)
    require(sorted(ranks) == list(range(len(ranks))), "worker ranks partition 0 … world_size-1")
    for role, of_role in role_ranks.items():
        require(sorted(of_role) == list(range(len(of_role))), "role ranks partition 0 … role_world_size-1")
        require(role_sizes[role] == {len(of_role)}, "all seats of a role know its size")


class Ledger:
    """Follows one run over all its servers; `revision` is that of its last durable fact."""

    def __init__(self) -> None:
        self.revision = 0
        self.settings = RunSettings()
        self.leases: dict[str, int] = {}
        self.rounds: dict[int, FrozenRound] = {}
        self.closed: Outcome | None = None
        self._workers: dict[str, tuple[int, str]] = {}
        self._departing: set[str] = set()
        # Whose workers had not succeeded when the last round ended.
        self._at_work: set[str] = set()
        self._evicted: set[str] = set()
        self._begins_at = 1
        self._now = 0.0
        self._last_lease = 0
        self._round = 0
        self._restarts = 0
        self._phase = Phase.JOINABLE
        # (phase, round) after every revision.
        self._at = [(Phase.JOINABLE, 0)]

    @property
    def _current(self) -> FrozenRound:
        return self.rounds[self._round]

    def record(self, revision: int, fact: facts.Fact, decided_at: float) -> None:
        """Take note of a fact that is durable, and was decided at that time (seconds)."""
        require(self.closed is None, "nothing happens to a run that is closed")
        require(revision == self.revision + 1, "revisions are 1, 2, 3, …")
        self.revision = revision
        self._now = decided_at
        created = isinstance(fact, facts.RunCreated)
        require(created == (self._begins_at == revision), "a run is created first of all, and once")
        getattr(self, "_" + type(fact).__name__)(fact)
        self._at.append((self._phase, self._round))

    def forget(self) -> None:
        """Take note that the run expired: whoever takes its name begins anew, but for the numbers."""
        require(not self.leases, "a run expires when nobody is in it")
        self.closed, self._phase = None, Phase.JOINABLE
        self._begins_at = self.revision + 1
        self._departing.clear()
        self._at_work.clear()
        self._evicted.clear()
        self._restarts = 0

    def _RunCreated(self, fact: facts.RunCreated) -> None:
        self.settings = fact.settings

    def _NodeJoined(self, fact: facts.NodeJoined) -> None:
        require(fact.lease > self._last_lease, "lease numbers grow")
        require(fact.node_id not in self.leases, "a node holds one lease")
        require(fact.node_id not in self._evicted, "who was evicted stays out")
        self.leases[fact.node_id] = self._last_lease = fact.lease
        self._workers[fact.node_id] = fact.local_world_size, fact.role

    def _NodeLost(self, fact: facts.NodeLost | facts.NodeLeft) -> None:
        require(fact.node_id in self.leases, "only who holds a lease can lose it")
        del self.leases[fact.node_id]
        self._departing.discard(fact.node_id)

    _NodeLeft = _NodeLost

    def _NodeDeparting(self, fact: facts.NodeDeparting) -> None:
        require(fact.node_id in self.leases, "only who holds a lease can depart")
        self._departing.add(fact.node_id)

    def _NodeEvicted(self, fact: facts.NodeEvicted) -> None:
        require(fact.node_id not in self._evicted, "a node is evicted once")
        require(
            self.leases.get(fact.node_id, 0) == fact.lease, "the lease that an evicted node loses is its own"
        )
        self._evicted.add(fact.node_id)
        self.leases.pop(fact.node_id, None)
        self._departing.discard(fact.node_id)

    def _NodeReadmitted(self, fact: facts.NodeReadmitted) -> None:
        require(fact.node_id in self._evicted, "only who was evicted is readmitted")
        self._evicted.discard(fact.node_id)

    def _RestartRequested(self, fact: facts.RestartRequested) -> None:
        require(self._phase in (Phase.FROZEN, Phase.FINAL), "only a round that is there can be restarted")
        require(fact.round == self._round, "the round to be restarted is the present one")

    def _ExitBarrierPassed(self, fact: facts.ExitBarrierPassed) -> None:
        require(self._phase is Phase.FINAL and fact.round == self._round, "a barrier is of the FINAL round")
        current = self._current
        require(bool(current.succeeded), "somebody waits at an exit barrier")
        require(not current.barrier_passed, "an exit barrier passes once")
        waited = self._now - current.first_success_at
        require(waited >= self.settings.exit_barrier_timeout, "an exit barrier holds for its timeout")
        current.barrier_passed = True

    def _RoundFrozen(self, fact: facts.RoundFrozen) -> None:
        require(fact.round > self._round, "a round number is never given out twice")
        require(self._phase is Phase.JOINABLE, "a round is formed when the one before has ended")
        require(
            self._departing.isdisjoint(self._at_work),
            "no round is formed while a leaving participant's old workers may be alive",
        )
        require(
            self._departing.isdisjoint(seat.node_id for seat in fact.seats), "who is leaving gets no seat"
        )
        settings = self.settings
        require(
            settings.min_nodes <= len(fact.seats) <= settings.max_nodes, "a round has min_nodes … max_nodes"
        )
        require(all(seat.node_id in self.leases for seat in fact.seats), "participants hold leases")
        check_ranks(fact.seats, self._workers)
        self._phase, self._round = Phase.FROZEN, fact.round
        seats = {seat.node_id: seat for seat in fact.seats}
        leases = {node_id: self.leases[node_id] for node_id in seats}
        self.rounds[fact.round] = FrozenRound(seats, leases, self.revision)

    def _require_seated(self, node_id: str, round_: int, phase: Phase) -> None:
        require(self._phase is phase and round_ == self._round, f"said of the round that is {phase.name}")
        require(node_id in self._current.seats, "said by a participant")
        held = self.leases.get(node_id)
        require(self._current.leases[node_id] == held, "said by who holds the participant's lease")

    def _NodeConfirmed(self, fact: facts.NodeConfirmed) -> None:
        self._require_seated(fact.node_id, fact.round, Phase.FROZEN)
        self._current.confirmed.add(fact.node_id)

    def _RoundFinalized(self, fact: facts.RoundFinalized) -> None:
        require(self._phase is Phase.FROZEN and fact.round == self._round, "what is FROZEN becomes FINAL")
        current = self._current
        require(current.confirmed == set(current.seats), "a round is FINAL when every participant confirmed")
        for node_id, lease in current.leases.items():
            require(self.leases.get(node_id) == lease, "all participants of a FINAL round hold their leases")
        self._phase, current.final_at = Phase.FINAL, self._now

    def _WorkerFailed(self, fact: facts.WorkerFailed) -> None:
        self._require_seated(fact.failure.node_id, fact.failure.round, Phase.FINAL)

    def _NodeSucceeded(self, fact: facts.NodeSucceeded) -> None:
        self._require_seated(fact.node_id, fact.round, Phase.FINAL)
        self._current.succeeded.add(fact.node_id)
        self._current.first_success_at = min(self._current.first_success_at, self._now)

    def _RoundEnded(self, fact: facts.RoundEnded) -> None:
        require(self._phase in (Phase.FROZEN, Phase.FINAL), "only a round that is there can end")
        require(fact.end.round == self._round, "the round that ends is the present one")
        self._restarts += fact.end.cause is RoundEndCause.WORKER_FAILED
        require(fact.restart_count == self._restarts, "restarts are counted, and nothing else is")
        require(self._restarts <= self.settings.max_restarts, "the budget of restarts is kept")
        if fact.end.cause is RoundEndCause.NODE_JOINED:
            self._check_scale_up()
        self._phase = Phase.JOINABLE
        self._at_work = self._current.seats.keys() - self._current.succeeded

    def _check_scale_up(self) -> None:
        current, settings = self._current, self.settings
        present = self.leases.keys() - self._departing
        require(not current.succeeded, "no work that is done is taken back for a newcomer")
        require(len(current.seats) < settings.max_nodes, "a full round ends for no newcomer")
        require(len(present) > len(current.seats), "a round that ends for newcomers has some")
        require(settings.scale_up_policy is not ScaleUpPolicy.ON_RESTART, "newcomers wait where they are to")
        if settings.scale_up_policy is ScaleUpPolicy.DELAYED:
            gathered = self._now >= current.final_at + settings.scale_up_delay
            require(gathered or len(present) >= settings.max_nodes, "newcomers are gathered for their delay")

    def _RunClosed(self, fact: facts.RunClosed) -> None:
        if fact.end.outcome is Outcome.SUCCEEDED:
            current = self._current
            require(self._phase is Phase.FINAL, "a run succeeds in a FINAL round")
            require(current.succeeded == set(current.seats), "a run succeeds when every participant has")
        if fact.end.outcome is Outcome.FAILED:
            require(self._restarts == self.settings.max_restarts, "a run fails when no restart is left")
            require(fact.end.failure is not None, "a failed run tells which worker failed")
        self.closed, self._phase = fact.end.outcome, Phase.CLOSED
        self.leases.clear()

    def check_told(self, update: pb.NodeUpdate | pb.Run) -> None:
        """Nothing is told that is not durable, and a phase is told as it was."""
        require(update.revision <= self.revision, "nothing is told before it is durable")
        require(Phase(update.phase) is self._at[update.revision][0], "the phase is that of the revision")

    def check_assignment(self, node_id: str, lease: int, update: pb.NodeUpdate) -> None:
        """An assignment is the seat that the journal has, and it is told to the holder of the seat."""
        phase, round_ = self._at[update.revision]
        formed = self.rounds.get(round_) if phase in (Phase.FROZEN, Phase.FINAL) else None
        if not update.HasField("assignment"):
            seated = formed is not None and formed.leases.get(node_id) == self.leases.get(node_id) == lease
            require(not seated or node_id in self._departing, "who has a seat is told so")
            return
        told = update.assignment
        require(formed is not None and told.round == round_, "an assignment is of the round that stands")
        assert formed is not None
        require(
            formed.leases.get(node_id) == lease,
            "an assignment goes to the lease that the round was formed with",
        )
        seat = formed.seats[node_id]
        require(
            (told.group_rank, told.base_rank, told.base_role_rank, told.role_world_size)
            == (seat.group_rank, seat.base_rank, seat.base_role_rank, seat.role_world_size),
            "an assignment is the seat of the journal",
        )
        require(told.group_world_size == len(formed.seats), "all are told the same number of nodes")
        world_size = sum(seat.local_world_size for seat in formed.seats.values())
        require(told.world_size == world_size, "all are told the same world size")
        require(
            told.fencing_token == formed.fencing_token, "one fencing token per round, and a greater one each"
        )
