"""Evidence of nodes: what keeps a lease alive. None of it is a fact; see `RunState`."""

from __future__ import annotations

import heapq
import math

from rallypoint.rendezvous.core.state import LossReason, Node, RunState

LEAST_TERM_AFTER_RESTART = 10.0
"""Seconds that a lease lives at least once its server has started again, however short its term. Nodes don't know when
that is: each waits up to some 2 s before it tries again, and takes longer on a network that is in trouble too. Longer
keeps a node that died meanwhile in its round for as long."""


def enqueue(state: RunState, node: Node) -> None:
    """Put a lease into the queue under its present deadline, in the place of its entry before."""
    node.queued_deadline = node.lease_deadline
    heapq.heappush(state.lease_queue, (node.lease_deadline, node.node_id, node.lease))


def renew(state: RunState, node_id: str, now: float) -> bool:
    """Take a sign of life of a node that holds a lease: its lease gets a full new term.

    Returns whether that ends earlier than the lease could have ended before: who waits for deadlines must know.
    """
    node = state.nodes[node_id]
    node.connected = True
    node.loss_if_expired = LossReason.LEASE_EXPIRED
    # The queue keeps the older, earlier entry; when that comes up it is put back with this deadline. So a
    # heartbeat costs no queue operation, but for the first one after a restart, which may bring the end nearer.
    node.lease_deadline = now + state.settings.time_to_live
    nearer = node.lease_deadline < node.queued_deadline
    if nearer:
        enqueue(state, node)
    return nearer


def disconnect(state: RunState, node_id: str, now: float) -> None:
    """Note that a node's stream broke: what is left of its lease shrinks to the disconnect grace."""
    node = state.nodes[node_id]
    node.connected = False
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
    term = max(state.settings.time_to_live, least)
    for node in state.nodes.values():
        node.connected = False
        node.lease_deadline = now + term
        enqueue(state, node)
