"""The nodes of the timers: whose agent may act for a node, and how long the node is remembered. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from hmac import compare_digest

from rallypoint.timer.core.learning import Scope, ScopeBook
from rallypoint.timer.core.values import (
    InvalidField,
    Learned,
    LeaseSuperseded,
    NotTheAgent,
    Subscription,
    SubscriptionReplaced,
    TakeoverUnconfirmed,
    TimerName,
    TooMany,
    check_name,
)


@dataclass(slots=True, eq=False)
class Timer:
    """A timer, running or expired."""

    node: TimerNode
    worker_id: str
    scope: str
    # Seconds; of a learning timer 0 until it has expired.
    after: float
    # When it began: on the watch clock, which decides, and on the monotonic clock, which gives `late_by`.
    start: float
    began: float
    # The client's number, and the subscription that sent it last; both 0 for a unary call.
    sequence: int
    stream: int
    # The scope it learns from, and the learned data at expiry; None: its timeout is given.
    learns: Scope[Timer] | None = None
    learned: Learned | None = None
    # 0: not expired.
    expiry_id: int = 0
    offers: int = 0

    @property
    def name(self) -> TimerName:
        """The unique name of the timer."""
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
    # Since when the agents of other incarnations hold their leases; two at most, and the last to ask is the last.
    held: dict[str, float] = field(default_factory=dict)
    # The number of the subscription in force; 0 if there is none.
    stream: int = 0
    # The secret and the name of the agent that subscribed last; empty: it has none.
    token: bytes = field(default=b"", repr=False)
    identity: str = ""
    workers: dict[str, dict[str, Timer]] = field(default_factory=dict)
    # Expired timers, by expiry id.
    expired: dict[int, Timer] = field(default_factory=dict)
    timers: int = 0

    def find(self, worker_id: str, scope: str) -> Timer | None:
        """Return the timer of that name, or None."""
        scopes = self.workers.get(worker_id)
        return None if scopes is None else scopes.get(scope)

    def all_timers(self) -> list[Timer]:
        """Return the node's timers; they may be dropped meanwhile."""
        return [timer for scopes in self.workers.values() for timer in scopes.values()]

    def ordered(self, beyond: TimerName | None) -> Iterator[Timer]:
        """Yield the node's timers in the order of their names, starting after `beyond`."""
        key = (self.run_id, self.node_id)
        for worker_id in sorted(self.workers):
            if beyond is not None and (*key, worker_id) < beyond[:3]:
                continue
            scopes = self.workers[worker_id]
            for scope in sorted(scopes):
                if beyond is None or (*key, worker_id, scope) > beyond:
                    yield scopes[scope]

    def ordered_expired(self, beyond: TimerName | None) -> Iterator[Timer]:
        """Yield the expired timers, as `ordered`, without visiting the running ones."""
        for timer in sorted(self.expired.values(), key=lambda timer: timer.name):
            if beyond is None or timer.name > beyond:
                yield timer

    def began_again(self, incarnation: str) -> bool:
        """Return True if a lease is from another incarnation of the run; numbers then do not order leases."""
        return incarnation not in ("", self.incarnation)

    def held_since(self, incarnation: str, leased_at: float) -> float:
        """Return since when a lease is held that seems to be held since `leased_at`.

        A message that arrives late, as at a paused service, makes a lease seem younger: the earliest known time
        counts.
        """
        return min(leased_at, self.held.get(incarnation, leased_at))

    def check_lease(self, lease: int | None, incarnation: str = "", leased_at: float = math.inf) -> None:
        """Check that no newer lease supersedes this one; None, no lease, is never superseded.

        Of two incarnations, the one whose agent got its lease later is newer. That is a total order, so two agents
        can't replace each other in turn. Only a subscriber is protected: without one, an older lease that gets in does
        no lasting harm, because the newer one is accepted again whenever it comes.
        """
        if lease is None:
            return
        if lease < 0:
            raise InvalidField("lease", "must not be negative")
        if self.began_again(incarnation):
            if self.stream and self.held_since(incarnation, leased_at) < self.leased_at:
                raise LeaseSuperseded(self.run_id, self.node_id, lease, self.lease, of_other_run=True)
        elif lease < self.lease:
            raise LeaseSuperseded(self.run_id, self.node_id, lease, self.lease)

    def check_token(self, token: bytes) -> None:
        """Check that a single call comes from the agent that subscribed last, if that has a token.

        Raises:
            NotTheAgent: It does not.
        """
        if self.token and not compare_digest(token, self.token):
            raise NotTheAgent(self.run_id, self.node_id)

    def check_agent(self, lease: int, incarnation: str, token: bytes, identity: str) -> None:
        """Check that a caller may replace the subscriber, if there is one: an agent with its name, or itself.

        Raises:
            NotTheAgent: It may not.
        """
        if not self.stream:
            return
        if self.identity not in ("", identity):
            raise NotTheAgent(self.run_id, self.node_id)
        if lease == self.lease and not self.began_again(incarnation):
            self.check_token(token)

    def succeed(self, incarnation: str, leased_at: float) -> None:
        """Move the node to another incarnation of the run, with a lease held since `leased_at`.

        An agent has to ask twice before it replaces a subscriber: a message that was held up on the network makes an
        older lease seem younger, and after a restart nothing earlier is known of it. The second one shows its age.
        """
        if self.stream and incarnation not in self.held:
            if len(self.held) > 1:
                self.held.popitem()
            self.held[incarnation] = leased_at
            raise TakeoverUnconfirmed(self.run_id, self.node_id)
        leased_at = self.held_since(incarnation, leased_at)
        self.held = {self.incarnation: self.leased_at}
        self.lease, self.incarnation, self.leased_at = 0, incarnation, leased_at


class Nodes:
    """All nodes, by run and name."""

    def __init__(self, most: int, book: ScopeBook[Timer]) -> None:
        """Create it empty, for at most `most` nodes; `book` is notified which runs have nodes."""
        self._most = most
        self._book = book
        self._nodes: dict[tuple[str, str], TimerNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, run_id: str, node_id: str) -> TimerNode | None:
        """Return the node, or None if it is unknown."""
        return self._nodes.get((run_id, node_id))

    def claim(
        self,
        run_id: str,
        node_id: str,
        lease: int | None,
        incarnation: str = "",
        leased_at: float | None = None,
    ) -> TimerNode:
        """Return the node for the holder of that lease; create it if it is unknown.

        Args:
            lease: The caller's lease; None: the caller has none and needs none.
            incarnation: The incarnation of the run that granted the lease; "": unknown.
            leased_at: Since when the caller holds it, in monotonic seconds; None: unknown.

        Raises:
            InvalidField: A name is empty or too long, or the lease is negative.
            LeaseSuperseded: A newer lease of the node is known.
            TakeoverUnconfirmed: The caller would replace a subscriber of another incarnation, and has to ask again.
            TooMany: Too many nodes.
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
            raise TooMany("too many nodes", self._most, "end some runs or nodes first")
        node = TimerNode(run_id, node_id)
        node.check_lease(lease)
        node.lease, node.incarnation = lease or 0, incarnation
        node.leased_at = -math.inf if leased_at is None else leased_at
        self._nodes[run_id, node_id] = node
        self._book.enter(run_id)
        return node

    def subscribed(self, subscription: Subscription) -> TimerNode:
        """Return the node of a subscription that is in force.

        Raises:
            LeaseSuperseded, SubscriptionReplaced: The subscription is not in force.
        """
        node = self._nodes.get((subscription.run_id, subscription.node_id))
        if node is not None and node.stream == subscription.number and subscription.lease >= node.lease:
            return node
        if node is not None:
            if node.began_again(subscription.incarnation):
                raise LeaseSuperseded(
                    node.run_id, node.node_id, subscription.lease, node.lease, of_other_run=True
                )
            node.check_lease(subscription.lease)
        raise SubscriptionReplaced(subscription.run_id, subscription.node_id)

    def remove(self, node: TimerNode, now: float) -> None:
        """Forget a node that has no timers."""
        del self._nodes[node.run_id, node.node_id]
        self._book.leave(node.run_id, now)

    def ordered(self, run_id: str, node_id: str, beyond: TimerName | None) -> list[TimerNode]:
        """Return the nodes with that run and name ("": any), in order, starting with the node of `beyond`."""
        chosen = [
            key
            for key in self._nodes
            if (not run_id or key[0] == run_id)
            and (not node_id or key[1] == node_id)
            and (beyond is None or key >= beyond[:2])
        ]
        return [self._nodes[key] for key in sorted(chosen)]
