"""The nodes that timers belong to: whose agent may act for one, and until when it is remembered. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from rallypoint.timer.learning import Scope, ScopeBook
from rallypoint.timer.names import check_name
from rallypoint.timer.refusals import InvalidField, LeaseLost, StreamReplaced, TooMany
from rallypoint.timer.values import Learned, Subscription, TimerName


@dataclass(slots=True, eq=False)
class Timer:
    """A timer, counting or run out."""

    node: Node
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
class Node:
    """A node and its timers."""

    run_id: str
    node_id: str
    # The highest lease seen.
    lease: int = 0
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

    def check_lease(self, lease: int | None) -> None:
        """Refuses a lease that another superseded; None is none, and superseded by none."""
        if lease is None:
            return
        if lease < 0:
            raise InvalidField("lease", "must not be negative")
        if lease < self.lease:
            raise LeaseLost(self.run_id, self.node_id, lease, self.lease)


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
        self._nodes: dict[tuple[str, str], Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, run_id: str, node_id: str) -> Node | None:
        """The node, if it is known."""
        return self._nodes.get((run_id, node_id))

    def claim(self, run_id: str, node_id: str, lease: int | None) -> Node:
        """The node, made if need be, for a caller who holds that lease.

        Raises:
            InvalidField: a name is empty or too long, or the lease is negative.
            LeaseLost: a newer lease of the node is known.
            TooMany: too many nodes.
        """
        node = self._nodes.get((run_id, node_id))
        if node is not None:
            node.check_lease(lease)
            node.lease = max(node.lease, lease or 0)
            return node
        check_name("run_id", run_id)
        check_name("node_id", node_id)
        if len(self._nodes) >= self._most:
            raise TooMany("too many nodes", self._most, "end some first")
        node = Node(run_id, node_id)
        node.check_lease(lease)
        node.lease = lease or 0
        self._nodes[run_id, node_id] = node
        self._book.enter(run_id)
        return node

    def subscribed(self, subscription: Subscription) -> Node:
        """The node of a subscription in force.

        Raises:
            LeaseLost, StreamReplaced: it is not.
        """
        node = self._nodes.get((subscription.run_id, subscription.node_id))
        if node is not None and node.stream == subscription.number and subscription.lease >= node.lease:
            return node
        if node is not None:
            node.check_lease(subscription.lease)
        raise StreamReplaced(subscription.run_id, subscription.node_id)

    def remove(self, node: Node, now: float) -> None:
        """Forgets a node without timers."""
        del self._nodes[node.run_id, node.node_id]
        self._book.leave(node.run_id, now)

    def ordered(self, run_id: str, node_id: str, beyond: TimerName | None) -> list[Node]:
        """The nodes of that run and name ("": of all), in order, from that of `beyond` on."""
        chosen = [
            key
            for key in self._nodes
            if (not run_id or key[0] == run_id)
            and (not node_id or key[1] == node_id)
            and (beyond is None or key >= beyond[:2])
        ]
        return [self._nodes[key] for key in sorted(chosen)]
