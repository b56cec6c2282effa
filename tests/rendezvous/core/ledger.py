"""The invariant checks of random histories, independent of the core's decisions.

They follow a run by its durable facts and by the updates to nodes and watchers, and compare both with the
invariants of the design. They never read a `RunState`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.apply import LEAST_TERM_AFTER_RESTART
from rallypoint.rendezvous.core.failures import MOST_EVICTED, SETTLE_WINDOW, STEADY_AFTER, hold
from rallypoint.rendezvous.core.state import (
    Outcome,
    Phase,
    Reopen,
    ReportedFailure,
    RoundEndCause,
    RunSettings,
    ScaleUpPolicy,
    Seat,
)
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
    # The times, in seconds, at which FINAL was decided, and at which its first node succeeded.
    final_at: float = math.inf
    first_success_at: float = math.inf
    barrier_passed: bool = False
    # The server still knows these times by its own clock.
    seen: bool = False
    # The failed workers, as (node_id, local_rank), and the time of the first report.
    failed: set[tuple[str, int]] = field(default_factory=set)
    first_report_at: float = math.inf
    # The failure that counts as the first, and its time by the reports: -inf once the server has started again.
    first: ReportedFailure | None = None
    first_failed_at: float = -math.inf
    # The lost node to which the failure was attributed.
    lost: str = ""
    # Its start is recorded.
    started: bool = False


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
        # The nodes whose workers had not succeeded when the last round ended.
        self._at_work: set[str] = set()
        self._evicted: set[str] = set()
        self._evicted_by_service: set[str] = set()
        # The incarnations of the run, in order: one each time it was created or reopened.
        self.incarnations: list[str] = []
        self._begins_at = 1
        self._now = 0.0
        self._last_lease = 0
        self._round = 0
        # The error of a server's times and of reported ages, as a fraction of them.
        self.inexact = 0.0
        # The largest change of its wall clock between two lives of it, and its largest delay, in seconds.
        self.clock_jumps = 0.0
        self.at_most_late = math.inf
        self._started_at = -math.inf
        self._restarts = 0
        # The ended round, the time and the responsible node of each restart.
        self._caused: list[tuple[int, float, str]] = []
        self._quick = self._failed_scale_ups = 0
        # The round that ended with a counted restart, until the next one is FINAL.
        self._counted_round = 0
        self._permanent: ReportedFailure | None = None
        self._last_end: facts.RoundEnded | None = None
        # An operator has ended the back-off of the next round.
        self._hurried = False
        self._ended_at = -math.inf
        # The end of the last round that was FINAL.
        self._ran_until = -math.inf
        self._phase = Phase.JOINABLE
        # (phase, round) after every revision.
        self._at = [(Phase.JOINABLE, 0)]

    @property
    def _current(self) -> FrozenRound:
        return self.rounds[self._round]

    def record(self, revision: int, fact: facts.Fact, decided_at: float) -> None:
        """Record a durable fact that was decided at that time (seconds)."""
        require(revision == self.revision + 1, "revisions are 1, 2, 3, …")
        self.revision = revision
        self._now = decided_at
        if self.closed is not None and isinstance(fact, facts.RunCreated):
            self._reopen(fact)
        happens = self.closed is None or isinstance(fact, facts.NodeReadmitted)
        require(happens, "nothing happens to a run that is closed, unless it is reopened")
        created = isinstance(fact, facts.RunCreated)
        require(created == (self._begins_at == revision), "a run is created first of all, and once")
        getattr(self, "_" + type(fact).__name__)(fact)
        self._at.append((self._phase, self._round))

    def _reopen(self, fact: facts.RunCreated) -> None:
        """Record that the closed run begins again, as a new run with the same numbers and the operators' evictions."""
        require(fact.reopened, "a run is created once, and then reopened")
        allowed = {
            Reopen.NEVER: (),
            Reopen.FAILED: (Outcome.FAILED, Outcome.CANCELLED),
            Reopen.ALWAYS: tuple(Outcome),
        }[self.settings.reopen]
        require(self.closed in allowed, "a run is reopened after the ends for which its settings allow it")
        new = fact.incarnation == "" or fact.incarnation not in self.incarnations
        require(new, "no two incarnations of a run have one name")
        barred = self._evicted - self._evicted_by_service
        self.forget()
        self._begins_at = self.revision
        self._evicted |= barred

    def forget(self) -> None:
        """Record that the run expired: the next run of this name is new, but its numbers continue."""
        require(not self.leases, "a run expires when nobody is in it")
        self.closed, self._phase = None, Phase.JOINABLE
        self._begins_at = self.revision + 1
        self._departing.clear()
        self._at_work.clear()
        self._evicted.clear()
        self._evicted_by_service.clear()
        self._restarts = self._quick = self._counted_round = self._failed_scale_ups = 0
        self._caused.clear()
        self._permanent = self._last_end = None

    def begin_after(self, revision: int) -> None:
        """Record that the run, which does not exist, begins after a revision that is not its own."""
        require(revision >= self.revision, "a run that comes again goes on from its numbers")
        self._at += [(self._phase, self._round)] * (revision - self.revision)
        self.revision, self._begins_at = revision, revision + 1

    def server_started(self, now: float) -> None:
        """Record that a server started: it does not know the times of durable facts by its clock."""
        self._started_at = now
        for formed in self.rounds.values():
            formed.first_failed_at, formed.seen = -math.inf, False

    def _RunCreated(self, fact: facts.RunCreated) -> None:
        self.settings = fact.settings
        self.incarnations.append(fact.incarnation)

    def _NodeJoined(self, fact: facts.NodeJoined) -> None:
        require(fact.lease > self._last_lease, "lease numbers grow")
        require(fact.node_id not in self.leases, "a node holds one lease")
        require(fact.node_id not in self._evicted, "who was evicted stays out")
        self.leases[fact.node_id] = self._last_lease = fact.lease
        self._workers[fact.node_id] = fact.local_world_size, fact.role

    def _NodeLost(self, fact: facts.NodeLost) -> None:
        if fact.failed_round:
            self._check_attribution(fact)
        self._NodeLeft(fact)

    def _NodeLeft(self, fact: facts.NodeLost | facts.NodeLeft) -> None:
        require(fact.node_id in self.leases, "only who holds a lease can lose it")
        del self.leases[fact.node_id]
        self._departing.discard(fact.node_id)

    def _check_attribution(self, fact: facts.NodeLost) -> None:
        failed = self.rounds[fact.failed_round]
        require(failed.first is not None, "only a failure is attributed to the loss of a node")
        held = self.leases.get(fact.node_id)
        require(
            failed.leases.get(fact.node_id) == held, "a failure is attributed to a participant of its round"
        )
        require(not failed.lost, "a failure is attributed once")
        failed.lost = fact.node_id
        if self._phase is Phase.FINAL:
            require(fact.failed_round == self._round, "in a FINAL round, its own failure is attributed")
            return
        require(fact.failed_round == self._counted_round, "only a counted restart is taken back, and once")
        self._counted_round = 0
        self._restarts -= 1
        self._quick = max(0, self._quick - 1)
        self._caused = [each for each in self._caused if each[0] != fact.failed_round]
        self._hurried = True

    def _NodeDeparting(self, fact: facts.NodeDeparting) -> None:
        require(fact.node_id in self.leases, "only who holds a lease can depart")
        self._departing.add(fact.node_id)

    def _NodeEvicted(self, fact: facts.NodeEvicted) -> None:
        require(fact.node_id not in self._evicted, "a node is evicted once")
        require(
            self.leases.get(fact.node_id, 0) == fact.lease, "the lease that an evicted node loses is its own"
        )
        if fact.by_service:
            self._check_worn_out(fact)
            self._evicted_by_service.add(fact.node_id)
        self._evicted.add(fact.node_id)
        self.leases.pop(fact.node_id, None)
        self._departing.discard(fact.node_id)

    def _NodeReadmitted(self, fact: facts.NodeReadmitted) -> None:
        require(fact.node_id in self._evicted, "only who was evicted is readmitted")
        self._evicted.discard(fact.node_id)
        self._evicted_by_service.discard(fact.node_id)
        self._caused = [(round_, at, node) for round_, at, node in self._caused if node != fact.node_id] + [
            (round_, at, "") for round_, at, node in self._caused if node == fact.node_id
        ]

    def _RestartRequested(self, fact: facts.RestartRequested) -> None:
        require(fact.round == self._round, "the round to be restarted is the present one")
        self._failed_scale_ups = 0
        if self._phase in (Phase.FROZEN, Phase.FINAL):
            return
        last = self._last_end
        held_back = last is not None and hold(self.settings, self._quick) > 0
        require(held_back, "only a round that is there can be restarted, or a restart that is held back")
        self._quick, self._hurried = 0, True

    def _ExitBarrierPassed(self, fact: facts.ExitBarrierPassed) -> None:
        require(self._phase is Phase.FINAL and fact.round == self._round, "a barrier is of the FINAL round")
        current = self._current
        require(bool(current.succeeded), "somebody waits at an exit barrier")
        require(not current.barrier_passed, "an exit barrier passes once")
        waited = self._now - current.first_success_at
        timeout = self.settings.exit_barrier_timeout * (1 - self.inexact)
        require(waited >= timeout, "an exit barrier holds for its timeout")
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
        self._check_hold()
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
        require(self._permanent is None, "no round runs after a failure that no restart can mend")
        self._phase, current.final_at, current.seen = Phase.FINAL, self._now, True
        self._counted_round = 0

    def _RoundStarted(self, fact: facts.RoundStarted) -> None:
        require(
            self._phase is Phase.FINAL and fact.round == self._round, "what starts is the round that is FINAL"
        )
        current = self._current
        require(not current.started, "the start of a round is recorded once")
        require(not current.failed, "the start of a round is recorded before its first failure")
        current.started = True
        require(fact.slowest in current.seats, "the slowest node is a participant")
        nodes = len(current.seats)
        require(fact.group_world_size == nodes, "the start of a round names all its participants")
        require(0 < fact.reported_nodes <= nodes, "each participant reports the start of a round once")
        require(fact.age >= 0, "a round has started before that is recorded")
        since = (self._now - self._ran_until) * (1 + self.inexact) + self.clock_jumps
        require(0 <= fact.duration <= since, "a recovery takes no longer than since the round before")

    def _WorkerFailed(self, fact: facts.WorkerFailed) -> None:
        failure = fact.failure
        late = self._phase is not Phase.FINAL
        if late:
            self._require_just_failed(failure)
        else:
            self._require_seated(failure.node_id, failure.round, Phase.FINAL)
        failed = self.rounds[failure.round]
        worker = failure.node_id, failure.local_rank
        require(worker not in failed.failed, "a worker fails once")
        failed.failed.add(worker)
        failed.first_report_at = min(failed.first_report_at, self._now)
        if failure.permanent:
            self._permanent = self._permanent or failure
        at = max(self._now - failure.age, failed.final_at if failed.seen else -math.inf)
        slack = self.inexact * (self._now - failed.first_report_at + failure.age + 1.0)
        if failed.first is None:
            require(fact.earliest, "the only failure is the earliest")
        else:
            require(
                abs(at - failed.first_failed_at) < slack or fact.earliest == (at < failed.first_failed_at),
                "the earliest failure is the first",
            )
        if fact.earliest:
            failed.first, failed.first_failed_at = failure, at
            self._caused = [
                (round_, then, failure.node_id if round_ == failure.round else node)
                for round_, then, node in self._caused
            ]

    def _require_just_failed(self, failure: ReportedFailure) -> None:
        end = self._last_end
        require(
            end is not None and end.end.round == failure.round, "a late report is of the round just ended"
        )
        assert end is not None
        require(
            end.end.cause is RoundEndCause.WORKER_FAILED and not self.rounds[failure.round].lost,
            "late reports are taken where a failure ended it",
        )
        lease = self.rounds[failure.round].leases.get(failure.node_id)
        require(lease is not None and lease == self.leases.get(failure.node_id), "said by a participant")

    def _NodeSucceeded(self, fact: facts.NodeSucceeded) -> None:
        self._require_seated(fact.node_id, fact.round, Phase.FINAL)
        self._current.succeeded.add(fact.node_id)
        self._current.first_success_at = min(self._current.first_success_at, self._now)

    def _RoundEnded(self, fact: facts.RoundEnded) -> None:
        require(self._phase in (Phase.FROZEN, Phase.FINAL), "only a round that is there can end")
        require(fact.end.round == self._round, "the round that ends is the present one")
        failed = fact.end.cause is RoundEndCause.WORKER_FAILED
        if failed:
            self._check_restart(fact)
        self._check_quick(fact)
        self._restarts += failed
        require(fact.restart_count == self._restarts, "restarts are counted, and nothing else is")
        if fact.end.cause is RoundEndCause.NODE_JOINED:
            self._check_scale_up()
        self._last_end, self._ended_at, self._hurried = fact, self._now, False
        if self._phase is Phase.FINAL:
            self._at_work = self._current.seats.keys() - self._current.succeeded
            self._ran_until = self._now
        self._phase = Phase.JOINABLE

    def _counted(self, slack: float = 0.0) -> list[str]:
        """Return the nodes of the restarts in the window; `slack` widens or narrows it by the errors of the clocks."""
        window = self.settings.restart_window
        return [
            node
            for _, at, node in self._caused
            if window == 0 or at + window * (1 + slack * self.inexact) + slack * self.clock_jumps > self._now
        ]

    def _check_restart(self, fact: facts.RoundEnded) -> None:
        current, settings = self._current, self.settings
        require(current.first is not None, "a round that failed has a failure")
        assert current.first is not None
        require(not current.lost, "no restart is counted for the loss of a node")
        self._counted_round = self._round
        require(fact.end.node_id == current.first.node_id, "the first failure that is known is told")
        require(self._permanent is None, "what no restart can mend is not restarted")
        require(len(self._counted(-1.0)) < settings.max_restarts, "the budget of restarts is kept")
        if settings.max_restarts_per_node and len(self._evicted) < MOST_EVICTED:
            of_node = self._counted(-1.0).count(fact.end.node_id)
            require(
                of_node < settings.max_restarts_per_node or fact.end.node_id in self._evicted,
                "the budget of a node is kept",
            )
        self._caused.append((self._round, self._now, fact.end.node_id))

    def _check_worn_out(self, fact: facts.NodeEvicted) -> None:
        most, current = self.settings.max_restarts_per_node, self._current
        require(self._phase is Phase.FINAL and current.first is not None, "a node is worn out by a failure")
        assert current.first is not None
        require(current.first.node_id == fact.node_id, "the node is taken out that failed first")
        require(0 < most <= self._counted(1.0).count(fact.node_id), "a node has the whole of its budget")
        self._check_settled()

    def _check_quick(self, fact: facts.RoundEnded) -> None:
        """Check the count of quick restarts; a server that did not see a round begin takes it for a long one."""
        ran = self._now - self._current.final_at if self._phase is Phase.FINAL else 0.0
        steady = max(STEADY_AFTER, 2 * hold(self.settings, self._quick))
        unsure = abs(ran - steady) <= self.inexact * steady + self.clock_jumps or not self._current.seen
        broken = ran >= steady or fact.end.cause is RoundEndCause.RESTART_REQUESTED
        failed = fact.end.cause is RoundEndCause.WORKER_FAILED
        expected = {(0 if broken else self._quick) + failed}
        if unsure and self._phase is Phase.FINAL:
            expected |= {failed + 0, self._quick + failed}
        if fact.failed_scale_ups > self._failed_scale_ups:
            expected |= {number - failed for number in expected}
        require(fact.quick_restarts in expected, "restarts that come soon are counted in a row")
        self._failed_scale_ups = fact.failed_scale_ups
        self._quick = fact.quick_restarts

    def _check_hold(self) -> None:
        """Check that the restart had its back-off."""
        last = self._last_end
        if last is None or last.end.cause is not RoundEndCause.WORKER_FAILED or self._hurried:
            return
        held_back = hold(self.settings, last.quick_restarts)
        require(
            self._now >= self._ended_at + held_back * (1 - self.inexact),
            "a restart is held back where rounds fail soon",
        )

    def _check_failed(self, fact: facts.RunClosed) -> None:
        failure = fact.end.failure
        require(failure is not None, "a failed run tells which worker failed")
        assert failure is not None
        if self._permanent is not None:
            require(failure == self._permanent, "what no restart can mend ends the run")
        else:
            require(self._phase is Phase.FINAL, "a run fails in a FINAL round")
            require(failure == self._current.first, "a run fails of the first failure of its round")
            left = len(self._counted(1.0)) < self.settings.max_restarts
            require(not left, "a run fails when no restart is left")
        if self._phase is Phase.FINAL:
            self._check_settled()

    def _check_settled(self) -> None:
        """Check that other nodes had time to report an earlier failure, or have nothing to report."""
        current = self._current
        heard = {node_id for node_id, _ in current.failed} | current.succeeded | self._departing
        gone = {node_id for node_id, lease in current.leases.items() if self.leases.get(node_id) != lease}
        waited = self._now - current.first_report_at
        require(
            waited >= SETTLE_WINDOW * (1 - self.inexact)
            or bool(gone - current.succeeded)
            or current.seats.keys() <= heard | gone,
            "the end of a run waits for what others have to report",
        )
        require(not current.lost, "no run ends, and no node is taken out, for the loss of a node")
        self.check_wait()

    def check_wait(self, now: float | None = None) -> None:
        """Check that a failed round waited no longer than leases allow for participants without a sign of life."""
        if self._phase is not Phase.FINAL or self._started_at > self._current.first_report_at:
            return
        waited = (self._now if now is None else now) - self._current.first_report_at
        longest = SETTLE_WINDOW + max(self.settings.time_to_live, LEAST_TERM_AFTER_RESTART)
        require(waited <= longest + self.at_most_late, "the end of a run waits for no longer than a lease")

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
            self._check_failed(fact)
        self.closed, self._phase = fact.end.outcome, Phase.CLOSED
        self.leases.clear()

    def check_told(self, update: pb.NodeUpdate | pb.Run) -> None:
        """Check that an update is durable, and has the phase of its revision."""
        require(update.revision <= self.revision, "nothing is told before it is durable")
        require(Phase(update.phase) is self._at[update.revision][0], "the phase is that of the revision")

    def check_assignment(self, node_id: str, lease: int, update: pb.NodeUpdate) -> None:
        """Check that an assignment is the seat of the journal, and goes to the lease that holds the seat."""
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
