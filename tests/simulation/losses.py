"""Hosts that are lost, the workers that fail because of it, and what durable facts may make of the two.

The world knows which host was lost when, and whether a worker failed by itself or because a peer was gone. A round
of which a host was lost first must not count as a failure of its workers: no restart is counted for it in the end, no
node is blamed, and no run fails of it.
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
    from simulation.workers import Crew

# Seconds between a loss and a worker's own failure within which a server can't tell which came first.
_MARGIN = 0.5
# Seconds after which a server that runs has set right what it counted, once a loss is durable.
_SET_RIGHT = 1.0
# Seconds within which a broken stream and a decision may cross.
_CROSSING = 0.01
# Seconds between the death of a worker and the failure of its peers; collectives of a host that is silent time out.
RESET = (0.02, 0.1)
TIMEOUT = (1.0, 10.0)


@dataclass(eq=False, slots=True)
class Loss:
    """A host that was lost with workers of a round."""

    node_id: str
    lease: int
    at: float
    # Whether it is gone still: what was cut off comes back.
    still: Callable[[], bool]
    # Whether it is durable that it was lost, and it was gone then; None: it holds its lease.
    ended: bool | None = None


@dataclass(slots=True)
class RoundTruth:
    """What became of a round's hosts and workers, by the world's clock."""

    losses: list[Loss] = field(default_factory=list)
    # When the first worker failed, and the first that no loss made fail.
    failure_at: float = math.inf
    own_failure_at: float = math.inf


@dataclass(slots=True)
class Losses:
    """Keeps what is true of the rounds of all runs; `later` has something done after so many virtual seconds."""

    now: Callable[[], float]
    later: Callable[..., object]
    judge: Callable[[Callable[[], None]], None]
    # Whether facts come with the moment of their decision: what waits to be written is decided earlier than it shows.
    decided_is_known: bool = True
    # Workers that run.
    crews: set[Crew] = field(default_factory=set)
    rounds: dict[tuple[str, int], RoundTruth] = field(default_factory=dict)
    # Per run, node and lease: the stream that was opened last.
    streams: dict[tuple[str, str, int], ServerCall] = field(default_factory=dict)

    def of(self, run_id: str, round_: int) -> RoundTruth:
        """What is true of a round."""
        return self.rounds.setdefault((run_id, round_), RoundTruth())

    # ---- the world

    def host_lost(self, run_id: str, round_: int, loss: Loss) -> None:
        """Note that a host with a seat in a round is gone."""
        self.of(run_id, round_).losses.append(loss)

    def failed(self, group: Group, *, own: bool) -> None:
        """Note that workers fail: by themselves, or because a host is gone."""
        truth = self.of(group.run_id, group.round)
        truth.failure_at = min(truth.failure_at, self.now())
        if own:
            truth.own_failure_at = min(truth.own_failure_at, self.now())

    def peers(self, group: Group) -> list[Crew]:
        """Workers of the same round on other hosts."""
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
        """Note that a node that holds a lease has a stream, in the place of the one before."""
        subject = call.subject
        self.streams[subject.run_id, subject.node_id, subject.lease] = call

    def _broken_before(self, run_id: str, node_id: str, lease: int, when: float) -> bool:
        """Whether the server knew by then that the node has no stream open."""
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
        """Judge a fact; `decided_at`: when it was given to the journal, by the world's clock."""
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
        """Whether a round lost a host that it needed before any worker failed by itself; `known`: as all know."""
        truth, formed = self.rounds.get((run_id, round_)), ledger.rounds.get(round_)
        if truth is None or formed is None:
            return False
        return any(
            formed.leases.get(loss.node_id) == loss.lease
            and loss.node_id not in formed.succeeded
            # What failed for a host that came back may count, though another is lost by then.
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
