"""Sentences for people: why a node was lost or taken out, who joined, which worker failed and why that was the end."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.rendezvous.core.state import LossReason, RunSettings, WorkerFailure


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


def explain_eviction(node_id: str, reason: str, *, by_service: bool) -> str:
    """One sentence that says which node was taken out, by whom, and why."""
    return f"node {node_id} was taken out{'' if by_service else ' by an operator'}: {reason}"


def explain_failure(failure: WorkerFailure) -> str:
    """One sentence that says which worker failed, and of what."""
    return f"worker of rank {failure.rank} on node {failure.node_id} failed: {failure.message}"


def explain_worn_out(failures: int, window: float, last: WorkerFailure) -> str:
    """Why a node is taken out whose workers failed too often; `window` in seconds, 0: since the run began."""
    times = "once" if failures == 1 else f"{failures} times"
    return (
        f"its workers failed {times}{explain_window(window)}, last that of rank {last.rank}: {last.message}"
    )


def explain_spent(budget: int, window: float) -> str:
    """That no restart is left, of a budget that counts those within so many seconds, 0: all."""
    if budget == 0:
        return "no restarts were allowed"
    spent = "the only restart was used up" if budget == 1 else f"all {budget} restarts were used up"
    return spent + explain_window(window)


def explain_window(window: float) -> str:
    """The time that counts, as the end of a sentence; nothing where all does."""
    return f" in {window:g} s" if window else ""
