"""Facts as log lines: what an operator reads at night."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from rallypoint.rendezvous.core import facts
from rallypoint.rpc.logs import get_logger

_log = get_logger("rallypoint.rendezvous")


# In a run of more nodes than this, what every node does in every round is logged as debug only: n lines a round drown
# the one that matters, and writing them costs the server as much as the joining. ListEvents has them all.
_MANY_NODES = 16
_ROUTINE = (facts.NodeJoined, facts.NodeConfirmed, facts.NodeSucceeded)


def log_fact(run_id: str, fact: facts.Fact, nodes: int) -> None:
    """Log a fact that became durable, of a run with so many nodes."""
    routine = nodes > _MANY_NODES and isinstance(fact, _ROUTINE)
    if routine and not _log.debugging:
        return
    say = _log.debug if routine else _log.info
    event, fields = _line(fact)
    say(event, run_id=run_id, **fields)


@singledispatch
def _line(fact: facts.Fact) -> tuple[str, dict[str, Any]]:
    raise TypeError(f"not a fact: {fact!r}")


@_line.register
def _(fact: facts.RunCreated) -> tuple[str, dict[str, Any]]:
    return "run created", {"min_nodes": fact.settings.min_nodes, "max_nodes": fact.settings.max_nodes}


@_line.register
def _(fact: facts.NodeJoined) -> tuple[str, dict[str, Any]]:
    return "node joined", {"node_id": fact.node_id, "lease": fact.lease, "workers": fact.local_world_size}


@_line.register
def _(fact: facts.NodeLost) -> tuple[str, dict[str, Any]]:
    return "node lost", {"node_id": fact.node_id, "reason": fact.reason.name}


@_line.register
def _(fact: facts.NodeLeft) -> tuple[str, dict[str, Any]]:
    return "node left", {"node_id": fact.node_id, "reason": fact.reason}


@_line.register
def _(fact: facts.NodeDeparting) -> tuple[str, dict[str, Any]]:
    return "node departing", {"node_id": fact.node_id, "reason": fact.reason}


@_line.register
def _(fact: facts.NodeEvicted) -> tuple[str, dict[str, Any]]:
    by = "service" if fact.by_service else "operator"
    return "node evicted", {"node_id": fact.node_id, "by": by, "reason": fact.reason}


@_line.register
def _(fact: facts.NodeReadmitted) -> tuple[str, dict[str, Any]]:
    return "node readmitted", {"node_id": fact.node_id, "reason": fact.reason}


@_line.register
def _(fact: facts.RestartRequested) -> tuple[str, dict[str, Any]]:
    return "restart requested", {"round": fact.round, "reason": fact.reason}


@_line.register
def _(fact: facts.ExitBarrierPassed) -> tuple[str, dict[str, Any]]:
    return "exit barrier passed", {"round": fact.round}


@_line.register
def _(fact: facts.RoundFrozen) -> tuple[str, dict[str, Any]]:
    workers = sum(seat.local_world_size for seat in fact.seats)
    return "round frozen", {"round": fact.round, "nodes": len(fact.seats), "workers": workers}


@_line.register
def _(fact: facts.NodeConfirmed) -> tuple[str, dict[str, Any]]:
    return "node confirmed", {"round": fact.round, "node_id": fact.node_id}


@_line.register
def _(fact: facts.RoundFinalized) -> tuple[str, dict[str, Any]]:
    return "round final", {"round": fact.round}


@_line.register
def _(fact: facts.WorkerFailed) -> tuple[str, dict[str, Any]]:
    failure = fact.failure
    return "worker failed", {
        "node_id": failure.node_id,
        "rank": failure.rank,
        "message": failure.message,
        "earliest": fact.earliest,
    }


@_line.register
def _(fact: facts.NodeSucceeded) -> tuple[str, dict[str, Any]]:
    return "node succeeded", {"round": fact.round, "node_id": fact.node_id}


@_line.register
def _(fact: facts.RoundEnded) -> tuple[str, dict[str, Any]]:
    end = fact.end
    return "round ended", {"round": end.round, "reason": end.detail, "restart_count": fact.restart_count}


@_line.register
def _(fact: facts.RunClosed) -> tuple[str, dict[str, Any]]:
    return "run closed", {"outcome": fact.end.outcome.name, "reason": fact.end.detail}
