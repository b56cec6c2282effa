"""Checks of lost hosts and the worker failures they cause, against the durable facts.

The simulation knows when each host was lost, and if a worker failed by itself or because a peer was gone. A round
that lost a host first must not count as a failure of its workers: in the end no restart is counted for it, no node is
blamed, and no run fails because of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import Outcome, RoundEndCause
from rendezvous.core.ledger import require

if TYPE_CHECKING:
    from simulation.referee import Group, RunLedger
    from simulation.wire import ServerCall
    from simulation.workers import WorkerGroup

# Seconds between a loss and a worker's own failure within which a server can't know which came first.
_MARGIN = 0.5
# Seconds after a loss is durable within which a running server corrects its restart count.
_SET_RIGHT = 1.0
# Seconds within which the order of a broken stream and a decision is undefined.
_CROSSING = 0.01
# Seconds between the death of a worker and the failure of its peers; collectives with a silent host time out.
RESET = (0.02, 0.1)
TIMEOUT = (1.0, 10.0)


@dataclass(eq=False, slots=True)
class Loss:
    """A host that was lost with workers of a round."""

    node_id: str
    lease: int
    at: float
    # Returns True if it is still gone: a host that was cut off comes back.
    still: Callable[[], bool]
    # True if its lease ended by a durable loss while it was gone; None: it holds its lease.
    ended: bool | None = None


@dataclass(slots=True)
class RoundTruth:
    """Losses and failures of a round, by the world's clock."""

    losses: list[Loss] = field(default_factory=list)
    # The time of the first failure, and of the first that was not caused by a loss.
    failure_at: float = math.inf
    own_failure_at: float = math.inf


@dataclass(slots=True)
class Losses:
    """The losses and failures in the rounds of all runs; `later` schedules a call after a number of virtual seconds."""

    now: Callable[[], float]
    later: Callable[..., object]
    judge: Callable[[Callable[[], None]], None]
    # True if the decision time of each fact is known; a fact may be decided long before it is written.
    decided_is_known: bool = True
    # Running groups of workers.
    crews: set[WorkerGroup] = field(default_factory=set)
    rounds: dict[tuple[str, int], RoundTruth] = field(default_factory=dict)
    # By run, node and lease: the stream that was opened last.
    streams: dict[tuple[str, str, int], ServerCall] = field(default_factory=dict)

    def of(self, run_id: str, round_: int) -> RoundTruth:
        """Return the losses and failures of a round."""
        return self.rounds.setdefault((run_id, round_), RoundTruth())

    # ---- real events

    def host_lost(self, run_id: str, round_: int, loss: Loss) -> None:
        """Note that the host of a participant is gone."""
        self.of(run_id, round_).losses.append(loss)

    def failed(self, group: Group, *, own: bool) -> None:
        """Note that workers failed: by themselves, or because a host is gone."""
        truth = self.of(group.run_id, group.round)
        truth.failure_at = min(truth.failure_at, self.now())
        if own:
            truth.own_failure_at = min(truth.own_failure_at, self.now())

    def peers(self, group: Group) -> list[WorkerGroup]:
        """Return the workers of the same round on other hosts, by node id."""
        return sorted(
            (
                crew
                for crew in self.crews
                if (crew.group.run_id, crew.group.round) == (group.run_id, group.round)
                and crew.group.node_id != group.node_id
            ),
            key=lambda crew: crew.group.node_id,
        )

    # ---- the service

    def opened(self, call: ServerCall) -> None:
        """Note the new stream of a node with a lease; it replaces the one before."""
        subject = call.subject
        self.streams[subject.run_id, subject.node_id, subject.lease] = call

    def _broken_before(self, run_id: str, node_id: str, lease: int, when: float) -> bool:
        """Return True if the server knew by `when` that the node has no open stream."""
        call = self.streams.get((run_id, node_id, lease))
        return (
            self.decided_is_known
            and call is not None
            and call.process.alive
            and call.broken_at is not None
            and call.broken_at < when - _CROSSING
        )

    # ---- durable facts

    def durable(self, run_id: str, ledger: RunLedger, fact: facts.Fact, decided_at: float) -> None:
        """Check a fact; `decided_at`: when it was passed to the journal, by the world's clock."""
        match fact:
            case facts.RoundFrozen():
                for node_id, lease in ledger.rounds[fact.round].leases.items():
                    require(
                        not self._broken_before(run_id, node_id, lease, decided_at),
                        "no round freezes with a node whose stream is broken",
                    )
            case facts.RoundEnded():
                self._round_ended(run_id, ledger, fact, decided_at)
            case facts.NodeLost() | facts.NodeLeft() | facts.NodeEvicted(by_service=False):
                self._lease_ended(run_id, ledger, fact)
            case facts.NodeEvicted(by_service=True):
                require(
                    not self._lost_first(run_id, ledger, ledger.round),
                    "no node is blamed for the failures that follow a lost host",
                )
            case facts.RunClosed():
                failure = fact.end.failure
                if fact.end.outcome is Outcome.FAILED and failure is not None and not failure.permanent:
                    require(
                        not self._lost_first(run_id, ledger, failure.round),
                        "no run fails of the failures that follow a lost host",
                    )

    def _lease_ended(
        self, run_id: str, ledger: RunLedger, fact: facts.NodeLost | facts.NodeLeft | facts.NodeEvicted
    ) -> None:
        for (of_run, round_), truth in self.rounds.items():
            for loss in truth.losses:
                over = (loss.node_id, loss.lease) in ledger.ended
                if of_run == run_id and loss.node_id == fact.node_id and over and loss.ended is None:
                    loss.ended = isinstance(fact, facts.NodeLost) and loss.still()
                    if loss.ended:
                        self.later(_SET_RIGHT, self._expect_uncounted, run_id, ledger, round_)

    def _round_ended(self, run_id: str, ledger: RunLedger, fact: facts.RoundEnded, decided_at: float) -> None:
        formed = ledger.rounds[fact.end.round]
        if fact.end.cause is RoundEndCause.NODE_LOST:
            gone = any(ledger.leases.get(node_id) != lease for node_id, lease in formed.leases.items())
            require(gone, "a round ends for a lost node only if it has one")
        if fact.end.cause is not RoundEndCause.WORKER_FAILED:
            return
        for node_id, lease in formed.leases.items():
            at_work = ledger.leases.get(node_id) == lease and node_id not in formed.succeeded
            require(
                not (at_work and self._broken_before(run_id, node_id, lease, decided_at)),
                "a failure is held while the stream of another participant is broken",
            )

    def _lost_first(self, run_id: str, ledger: RunLedger, round_: int, *, known: bool = False) -> bool:
        """Return True if a round lost a needed host before a worker failed by itself; `known`: the loss is durable."""
        truth, formed = self.rounds.get((run_id, round_)), ledger.rounds.get(round_)
        if truth is None or formed is None:
            return False
        return any(
            formed.leases.get(loss.node_id) == loss.lease
            and loss.node_id not in formed.succeeded
            # A failure caused by a host that came back may count, even if another host is lost by then.
            and truth.failure_at > loss.at
            and truth.own_failure_at > loss.at + _MARGIN
            and (loss.ended or (loss.ended is None and loss.still() and not known))
            for loss in truth.losses
        )

    def _expect_uncounted(self, run_id: str, ledger: RunLedger, round_: int) -> None:
        def judge() -> None:
            running = not (ledger.forgotten or ledger.closed)
            if running and self._lost_first(run_id, ledger, round_, known=True):
                require(
                    not ledger.counts_restart_of(round_),
                    "no restart is counted for a round that a lost host ended",
                )

        self.judge(judge)
