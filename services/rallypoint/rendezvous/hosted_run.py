"""A run as this process hosts it: its state, and who is to be told of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.explain import explain_loss
from rallypoint.rendezvous.core.refusals import JoinTimedOut, LeaseLost, Refused
from rallypoint.rendezvous.core.state import LossReason, RunState
from rallypoint.rendezvous.errors import StreamReplaced
from rallypoint.rendezvous.slot import Slot
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.views import lease_message, node_update, run_message


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
    recorded: int = 0  # the last revision that was given to the journal
    writable_round: int | None = None  # see `RendezvousEngine.writable_round`
    members: dict[str, Member] = field(default_factory=dict)
    watchers: set[Slot[pb.Run]] = field(default_factory=set)

    def enrol(self, node_id: str, number: int) -> Member:
        """Take a node's stream in, in the place of an older one of the same node."""
        older = self.members.get(node_id)
        if older is not None:
            older.updates.end(StreamReplaced("the node opened a newer stream with the same lease"))
        lease = lease_message(self.state, number)
        member = self.members[node_id] = Member(self.state.run_id, node_id, lease, Slot())
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

    def end_stale_member(self, fact: facts.NodeLost | facts.NodeLeft) -> None:
        """End the stream of a node whose lease is gone: in order if it left, with the reason if it was lost."""
        member = self.members.get(fact.node_id)
        if member is None or self.holds_lease(member.node_id, member.lease.lease):
            return
        del self.members[fact.node_id]
        member.updates.end(self._refusal(member, fact) if isinstance(fact, facts.NodeLost) else None)

    def _refusal(self, member: Member, loss: facts.NodeLost) -> Refused:
        run_id, settings = self.state.run_id, self.state.settings
        if loss.reason is LossReason.JOIN_TIMED_OUT:
            return JoinTimedOut(run_id, loss.node_id, settings.min_nodes, settings.join_timeout)
        node = self.state.nodes.get(loss.node_id)
        detail = explain_loss(loss.node_id, loss.reason, settings)
        return LeaseLost(run_id, loss.node_id, member.lease.lease, node.lease if node else None, detail)

    def tell_members(self) -> None:
        """Tell every node the present state, and end their streams once the run is closed."""
        for member in self.members.values():
            member.updates.put(node_update(self.state, member.node_id))
        if self.state.run_end is not None:
            for member in self.members.values():
                member.updates.end()
            self.members.clear()

    def tell_watchers(self) -> None:
        """Tell every watcher the present state, and end their streams once the run is closed."""
        if not self.watchers:
            return
        message = run_message(self.state)
        for watcher in self.watchers:
            watcher.put(message)
            if self.state.run_end is not None:
                watcher.end()

    def slots(self) -> Iterator[Slot[Any]]:
        """Where everybody who is told of the run waits."""
        yield from (member.updates for member in self.members.values())
        yield from self.watchers
