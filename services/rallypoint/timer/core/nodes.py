"""The nodes that timers belong to: whose agent may act for one, and until when it is remembered. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from rallypoint.timer.core.learning import Scope, ScopeBook
from rallypoint.timer.core.values import (
    InvalidField,
    Learned,
    LeaseLost,
    StreamReplaced,
    Subscription,
    TimerName,
    TooMany,
    check_name,
)


@dataclass(slots=True, eq=False)
class Timer:
    """A timer, counting or run out."""

    node: TimerNode
    worker_id: str
    scope: str
    # Seconds; of one that learns, 0 until it has run out.
    after: float
    # When it began: on the watch clock, which decides, and on the plain one, which says how late we are.
    start: float
    began: float
    # The client's number, and the subscription that sent it last; both 0 for a single call.
    sequence: int
    stream: int
    # What it goes by if it learns, and what that was when it ran out.
    learns: Scope[Timer] | None = None
    learned: Learned | None = None
    # Not 0: it ran out.
    expiry_id: int = 0
    offers: int = 0

    @property
    def name(self) -> TimerName:
        """What there is one of."""
        return TimerName(self.node.run_id, self.node.node_id, self.worker_id, self.scope)


@dataclass(slots=True, eq=False)
class TimerNode:
    """A node and its timers."""

    run_id: str
    node_id: str
    # The highest lease seen, of the latest incarnation of the run, and since when its agent holds it.
    lease: int = 0
    incarnation: str = ""
    leased_at: float = -math.inf
    # The incarnation before, and since when its agent held its last lease.
    former: tuple[str, float] = ("", -math.inf)
    # The number of the subscription in force; 0 if there is none.
    stream: int = 0
    workers: dict[str, dict[str, Timer]] = field(default_factory=dict)
    # Timers that ran out, by expiry id.
    expired: dict[int, Timer] = field(default_factory=dict)
    timers: int = 0

    def find(self, worker_id: str, scope: str) -> Timer | None:
        """The timer of that name."""
        scopes = self.workers.get(worker_id)
        return None if scopes is None else scopes.get(scope)

    def ordered(self, beyond: TimerName | None) -> Iterator[Timer]:
        """Its timers, ordered by their names, from `beyond` (excluded) on."""
        place = (self.run_id, self.node_id)
        for worker_id in sorted(self.workers):
            if beyond is not None and (*place, worker_id) < beyond[:3]:
                continue
            scopes = self.workers[worker_id]
            for scope in sorted(scopes):
                if beyond is None or (*place, worker_id, scope) > beyond:
                    yield scopes[scope]

    def ordered_expired(self, beyond: TimerName | None) -> Iterator[Timer]:
        """Those of them that ran out, likewise; at no cost for the others."""
        for timer in sorted(self.expired.values(), key=lambda timer: timer.name):
            if beyond is None or timer.name > beyond:
                yield timer

    def began_again(self, incarnation: str) -> bool:
        """Whether a lease is of another incarnation of the run, so that numbers say nothing of which is the newer."""
        return incarnation not in ("", self.incarnation)

    def held_since(self, incarnation: str, leased_at: float) -> float:
        """The time since when a lease is held, for one that seems to be held since `leased_at`.

        What comes late, as to a service that was paused, seems to have begun late: the earliest that is known counts.
        """
        former, since = self.former
        return min(leased_at, since) if incarnation == former else leased_at

    def check_lease(self, lease: int | None, incarnation: str = "", leased_at: float = math.inf) -> None:
        """Refuses a lease that another superseded; None is none, and superseded by none.

        Of two incarnations the one whose agent got its lease later is the newer. That is an order, so that no two
        agents can push each other out in turn. Only a subscriber is defended: whatever comes while there is none can be
        made up for, for the newer one is taken again whenever it comes.
        """
        if lease is None:
            return
        if lease < 0:
            raise InvalidField("lease", "must not be negative")
        if self.began_again(incarnation):
            if self.stream and self.held_since(incarnation, leased_at) < self.leased_at:
                raise LeaseLost(self.run_id, self.node_id, lease, self.lease, of_other_run=True)
        elif lease < self.lease:
            raise LeaseLost(self.run_id, self.node_id, lease, self.lease)

    def succeed(self, incarnation: str, leased_at: float) -> None:
        """Be in another incarnation of the run, with a lease held since then."""
        leased_at = self.held_since(incarnation, leased_at)
        self.former = self.incarnation, self.leased_at
        self.lease, self.incarnation, self.leased_at = 0, incarnation, leased_at


class Nodes:
    """All nodes, by run and name."""

    def __init__(self, most: int, book: ScopeBook[Timer]) -> None:
        """Makes it empty.

        Args:
            most: of them.
            book: to be told which runs have nodes.
        """
        self._most = most
        self._book = book
        self._nodes: dict[tuple[str, str], TimerNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, run_id: str, node_id: str) -> TimerNode | None:
        """The node, if it is known."""
        return self._nodes.get((run_id, node_id))

    def claim(
        self,
        run_id: str,
        node_id: str,
        lease: int | None,
        incarnation: str = "",
        leased_at: float | None = None,
    ) -> TimerNode:
        """The node, made if need be, for a caller who holds that lease.

        Args:
            run_id: Name of the run.
            node_id: Name of the node.
            lease: The caller's; None: it has none, and needs none.
            incarnation: Of the run, whose lease it is; "": not known.
            leased_at: Since when the caller holds it, in monotonic seconds; None: not known.

        Raises:
            InvalidField: a name is empty or too long, or the lease is negative.
            LeaseLost: a newer lease of the node is known.
            TooMany: too many nodes.
        """
        node = self._nodes.get((run_id, node_id))
        if incarnation:
            check_name("incarnation", incarnation)
        if node is not None:
            if leased_at is None:
                node.check_lease(lease)
            else:
                node.check_lease(lease, incarnation, leased_at)
                if node.began_again(incarnation):
                    node.succeed(incarnation, leased_at)
                elif (lease or 0) > node.lease:
                    node.leased_at = leased_at
                else:
                    node.leased_at = min(node.leased_at, leased_at)
            node.lease = max(node.lease, lease or 0)
            return node
        check_name("run_id", run_id)
        check_name("node_id", node_id)
        if len(self._nodes) >= self._most:
            raise TooMany("too many nodes", self._most, "end some first")
        node = TimerNode(run_id, node_id)
        node.check_lease(lease)
        node.lease, node.incarnation = lease or 0, incarnation
        node.leased_at = -math.inf if leased_at is None else leased_at
        self._nodes[run_id, node_id] = node
        self._book.enter(run_id)
        return node

    def subscribed(self, subscription: Subscription) -> TimerNode:
        """The node of a subscription in force.

        Raises:
            LeaseLost, StreamReplaced: it is not.
        """
        node = self._nodes.get((subscription.run_id, subscription.node_id))
        if node is not None and node.stream == subscription.number and subscription.lease >= node.lease:
            return node
        if node is not None:
            if node.began_again(subscription.incarnation):
                raise LeaseLost(node.run_id, node.node_id, subscription.lease, node.lease, of_other_run=True)
            node.check_lease(subscription.lease)
        raise StreamReplaced(subscription.run_id, subscription.node_id)

    def remove(self, node: TimerNode, now: float) -> None:
        """Forgets a node without timers."""
        del self._nodes[node.run_id, node.node_id]
        self._book.leave(node.run_id, now)

    def ordered(self, run_id: str, node_id: str, beyond: TimerName | None) -> list[TimerNode]:
        """The nodes of that run and name ("": of all), in order, from that of `beyond` on."""
        chosen = [
            key
            for key in self._nodes
            if (not run_id or key[0] == run_id)
            and (not node_id or key[1] == node_id)
            and (beyond is None or key >= beyond[:2])
        ]
        return [self._nodes[key] for key in sorted(chosen)]
