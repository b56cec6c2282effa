"""Sentences for people: why a node was lost, and who joined."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.core.state import LossReason, RunSettings


def explain_loss(node_id: str, reason: LossReason, settings: RunSettings) -> str:
    """One sentence that says which node was lost and how the server came to think so."""
    return f"node {node_id} was lost: {_HOW[reason].format(s=settings)}"


_HOW = {
    LossReason.LEASE_EXPIRED: (
        "no heartbeat for {s.time_to_live:g} s "
        "({s.keep_alive_max_attempt} missed, one every {s.keep_alive_interval:g} s)"
    ),
    LossReason.DISCONNECTED: "its connection broke and it did not come back within {s.disconnect_grace:g} s",
    LossReason.SUPERSEDED: "an agent joined again under its name",
    LossReason.CONFIRM_TIMED_OUT: "it did not confirm the round within {s.confirm_timeout:g} s",
    LossReason.DEPARTURE_TIMED_OUT: "it said it would leave and did not within {s.confirm_timeout:g} s",
    LossReason.JOIN_TIMED_OUT: "fewer than {s.min_nodes} nodes were there after {s.join_timeout:g} s",
}


def explain_newcomers(node_ids: Sequence[str]) -> str:
    """One sentence that says who joined, short however many did."""
    first, *others = node_ids
    if not others:
        return f"node {first} joined"
    if len(others) == 1:
        return f"nodes {first} and {others[0]} joined"
    return f"node {first} and {len(others)} others joined"
