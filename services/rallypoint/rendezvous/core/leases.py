"""Evidence of nodes: what keeps a lease alive. None of it is a fact; see `RunState`."""

from __future__ import annotations

import heapq
import math

from rallypoint.rendezvous.core.state import LossReason, Node, RunState

LEAST_TERM_AFTER_RESTART = 10.0
"""Seconds that a lease lives at least once its server has started again, however short its term. Nodes don't know when
that is: each waits up to some 2 s before it tries again, and takes longer on a network that is in trouble too. Longer
keeps a node that died meanwhile in its round for as long."""

LONG_PAUSE = 3.0
"""Seconds, as they are forgiven, from which a pause of the server may have broken streams: clients give a connection up
that answers no ping for 5 s, those of others perhaps sooner. After a shorter pause streams are as they were."""

# Seconds without a node that comes back after which all have that will. A herd comes in one go, but a busy machine may
# stall for some of them; longer keeps a node that died meanwhile in its round for as long.
_ALL_BACK = 5.0
# Seconds after a pause at which leases end again, even if nodes come and go all the time.
_LONGEST_SPARED = 60.0


def enqueue(state: RunState, node: Node) -> None:
    """Put a lease into the queue under its present deadline, in the place of its entry before."""
    node.queued_deadline = node.lease_deadline
    heapq.heappush(state.lease_queue, (node.lease_deadline, node.node_id, node.lease))


def renew(state: RunState, node_id: str, now: float) -> bool:
    """Take a sign of life of a node that holds a lease: its lease gets a full new term.

    Returns whether the run must be settled: it waited for this node, or the lease ends earlier than it could have.
    """
    node = state.nodes[node_id]
    was_missed = not node.connected or node_id in state.silent
    if not node.connected:
        node.connected_at, node.broken_at = now, None
        state.disconnected.discard(node_id)
    state.silent.discard(node_id)
    node.seen_at = now
    node.loss_if_expired = LossReason.LEASE_EXPIRED
    # The queue keeps the older, earlier entry; when that comes up it is put back with this deadline. So a
    # heartbeat costs no queue operation, but for the first one after a restart, which may bring the end nearer.
    node.lease_deadline = now + state.settings.time_to_live
    nearer = node.lease_deadline < node.queued_deadline
    if nearer:
        enqueue(state, node)
    return nearer or was_missed


def note_broken(state: RunState, node_id: str, now: float) -> None:
    """Note that a node has no stream, and leave it what is left of its lease."""
    state.nodes[node_id].broken_at = now
    state.disconnected.add(node_id)


def disconnect(state: RunState, node_id: str, now: float) -> None:
    """Note that a node's stream broke: what is left of its lease shrinks to the disconnect grace."""
    note_broken(state, node_id, now)
    node = state.nodes[node_id]
    node.loss_if_expired = LossReason.DISCONNECTED
    node.lease_deadline = min(node.lease_deadline, now + state.settings.disconnect_grace)
    enqueue(state, node)


def prune(state: RunState, now: float) -> None:
    """Bring the head of the lease queue up to date: dead entries go, those of renewed leases move back."""
    queue = state.lease_queue
    while queue and queue[0][0] <= now:
        deadline, node_id, lease = queue[0]
        node = state.nodes.get(node_id)
        if node is None or node.lease != lease or node.queued_deadline != deadline:
            heapq.heappop(queue)
        elif node.lease_deadline > deadline:
            heapq.heappop(queue)
            enqueue(state, node)
        else:
            return


def restart_leases(state: RunState, now: float, least: float = LEAST_TERM_AFTER_RESTART) -> None:
    """Give every lease a full new term, and time to come back: who was away has no evidence against anybody.

    That is `least` seconds, where the term is shorter.

    Nor has it of when the round began. A failure that is known stays the first: what is reported from now on may be
    older only by the time that the server was away.
    """
    state.lease_queue = []
    state.final_at = state.first_failed_at = -math.inf
    state.failure_reported_at = now
    state.disconnected = set(state.nodes)
    term = max(state.settings.time_to_live, least)
    for node in state.nodes.values():
        node.seen_at = node.connected_at = -math.inf
        node.broken_at = now
        node.lease_deadline = now + term
        enqueue(state, node)


def spared_until(state: RunState) -> float:
    """Until when no lease ends, whatever its deadline: for a while after a pause of the server that broke streams.

    As after a restart, nodes come back when they do. That their streams ended is noticed only now, and means nothing.
    While some come back others may still be waiting for their turn: the service is busy with a herd of them.
    """
    longest = state.woke_at + _LONGEST_SPARED
    return min(max(state.woke_at + LEAST_TERM_AFTER_RESTART, state.returned_at + _ALL_BACK), longest)
