"""A run as this process hosts it: its state, and who is to be told of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rallypoint.rendezvous.arrivals import Arrivals
from rallypoint.rendezvous.base.cooperative import Slot
from rallypoint.rendezvous.base.errors import StreamReplaced
from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.commands import JoinTimedOut, LeaseLost, NodeIsEvicted, Refused
from rallypoint.rendezvous.core.decide import next_deadline
from rallypoint.rendezvous.core.facts import explain_loss
from rallypoint.rendezvous.core.state import LossReason, RunState
from rallypoint.rendezvous.history import History
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.views import NODES_PER_MESSAGE, lease_message, node_update, run_message

# A checkpoint is written after so many records at least, and after so many per node: each costs as much as its nodes,
# and a recovery folds no more than these.
_RECORDS_PER_CHECKPOINT = 1_000
_RECORDS_PER_NODE = 4
# A large run is told to its watchers no oftener than every so many seconds per node: building the message takes about a
# tenth of that, so watching costs no more than a tenth of the server. A small one is told every change.
_PACE_PER_NODE = 50e-6
_SMALL_RUN = 256


@dataclass(eq=False, slots=True)
class Member:
    """A node with a stream open; `updates` is what waits to be told to it."""

    run_id: str
    node_id: str
    lease: pb.Lease
    updates: Slot[pb.NodeUpdate]


@dataclass(slots=True)
class HostedRun:
    """A run, and who is to be told of it."""

    state: RunState
    history: History
    recorded: int = 0  # the last revision that was given to the journal
    checkpoint: int = 0  # the last revision that a checkpoint has
    writable_round: int | None = None  # see `RendezvousEngine.writable_round`
    ended: bool = False  # whether it is durable that the run is closed
    members: dict[str, Member] = field(default_factory=dict)
    # Nodes that ask to be taken in again, with the leases that they show, and on how many streams they ask.
    returning: Counter[tuple[str, int]] = field(default_factory=Counter)
    arrivals: Arrivals = field(default_factory=Arrivals)
    watchers: set[Slot[pb.Run]] = field(default_factory=set)
    followers: set[Slot[int]] = field(default_factory=set)
    # The revision that watchers were told last, and when they may be told again.
    _told: int = 0
    _tell_at: float = -math.inf
    # The revision that followers were told last.
    _followed: int = 0
    # Whether members were told that the round settles, which they are once: failures may come by the thousand.
    _settling: bool = False

    def expires(self, time_to_live: float) -> float:
        """When the run is to be forgotten; infinity while it has nodes."""
        return math.inf if self.state.idle_since is None else self.state.idle_since + time_to_live

    def next_deadline(self, time_to_live: float) -> float | None:
        """When to look at the run again if nothing happens to it; None: never."""
        deadline = min(next_deadline(self.state) or math.inf, self.expires(time_to_live))
        if self.watchers and self._told < self.state.revision:
            deadline = min(deadline, self._tell_at)
        return None if deadline == math.inf else deadline

    def wants_checkpoint(self) -> bool:
        """Whether there are so many records since the last checkpoint that it is time for one."""
        most = max(_RECORDS_PER_CHECKPOINT, _RECORDS_PER_NODE * len(self.state.nodes))
        return self.recorded - self.checkpoint >= most

    def latest_round(self) -> int:
        """Return the one round whose workers may write, by the latest facts, durable or not."""
        last, latest = self.state.last_round_end, self.state.round
        over = last is not None and last.round == latest
        # A run that came again after it expired begins where the rounds ended whose numbers it goes on from.
        inherited = latest > 0 and self.state.fencing_token == 0
        return latest + 1 if over or inherited else latest

    def keep_writable_round(self) -> None:
        """Take over from the state, which is durable as it is, which round may write, and whether any may."""
        self.writable_round = self.latest_round()
        self.ended = self.state.run_end is not None

    def enrol(self, node_id: str, number: int) -> Member:
        """Take a node's stream in, in the place of an older one of the same node."""
        older = self.members.get(node_id)
        if older is not None:
            older.updates.end(StreamReplaced("the node opened a newer stream with the same lease"))
        lease = lease_message(self.state, number)
        member = self.members[node_id] = Member(self.state.run_id, node_id, lease, Slot())
        self.arrivals.add(member.updates.wake, self.state.settings.time_to_live)
        return member

    def farewell(self, node_id: str, number: int) -> Member:
        """What a node gets that comes back to a run which was closed while it was away."""
        member = Member(self.state.run_id, node_id, lease_message(self.state, number), Slot())
        member.updates.put(node_update(self.state, node_id))
        member.updates.end()
        return member

    def holds_lease(self, node_id: str, lease: int) -> bool:
        """Whether a node's lease stands. The state may be ahead of what the node was told."""
        node = self.state.nodes.get(node_id)
        return node is not None and node.lease == lease

    def end_stale_member(self, fact: facts.NodeLost | facts.NodeLeft | facts.NodeEvicted) -> None:
        """End the stream of a node whose lease is gone: in order if it left, with the reason if not."""
        member = self.members.get(fact.node_id)
        if member is None or self.holds_lease(member.node_id, member.lease.lease):
            return
        del self.members[fact.node_id]
        member.updates.end(None if isinstance(fact, facts.NodeLeft) else self._refusal(member, fact))

    def _refusal(self, member: Member, loss: facts.NodeLost | facts.NodeEvicted) -> Refused:
        run_id, settings = self.state.run_id, self.state.settings
        if isinstance(loss, facts.NodeEvicted):
            return NodeIsEvicted(run_id, loss.node_id, loss.reason, loss.by_service)
        if loss.reason is LossReason.JOIN_TIMED_OUT:
            return JoinTimedOut(run_id, loss.node_id, settings.min_nodes, settings.join_timeout)
        node = self.state.nodes.get(loss.node_id)
        detail = explain_loss(loss.node_id, loss.reason, settings)
        return LeaseLost(run_id, loss.node_id, member.lease.lease, node.lease if node else None, detail)

    def begins_to_settle(self) -> bool:
        """Whether members must be told that the round settles; asked once for each change."""
        before, self._settling = self._settling, self.state.settling
        return self._settling and not before

    def tell_members(self) -> None:
        """Tell every node the present state, and end their streams once the run is closed."""
        for member in self.members.values():
            member.updates.put(node_update(self.state, member.node_id))
        if self.state.run_end is not None:
            for member in self.members.values():
                member.updates.end()
            self.members.clear()

    def add_watcher(self, watcher: Slot[pb.Run], revision: int) -> None:
        """Take a watcher in, which has seen `revision`; it is told at once if there is something newer."""
        due = [*self.watchers] if self._told < self.state.revision else []
        if self.state.revision > revision:
            due.append(watcher)
        if due:
            message = run_message(self.state, end=NODES_PER_MESSAGE)
            for each in due:
                each.put(message)
        self._told = self.state.revision
        self.watchers.add(watcher)

    def tell_watchers(self, now: float) -> None:
        """Tell every watcher what is new, and end their streams once the run is closed.

        A large run that changes quickly is told to them now and then only; its deadline sees to the rest.
        """
        if self._followed < self.history.latest:
            self._followed = self.history.latest
            for follower in self.followers:
                follower.put(self._followed)
        if self.watchers and self._told < self.state.revision and (now >= self._tell_at or self.ended):
            message = run_message(self.state, end=NODES_PER_MESSAGE)
            for watcher in self.watchers:
                watcher.put(message)
            self._told = self.state.revision
            nodes = len(self.state.nodes)
            self._tell_at = now + _PACE_PER_NODE * nodes if nodes > _SMALL_RUN else -math.inf
        if self.ended:
            for watcher in self.watchers:
                watcher.end()
            for follower in self.followers:
                follower.end()
            self.watchers.clear()
            self.followers.clear()

    def slots(self) -> Iterator[Slot[Any]]:
        """Where everybody who is told of the run waits."""
        yield from (member.updates for member in self.members.values())
        yield from self.watchers
        yield from self.followers
