"""The start of a round: the reports of its participants, and the one fact that sums them up.

A report is no fact. It is kept in memory, and the node repeats it to the server that comes next, so that a round of
thousands of nodes costs one commit. Only that the start is recorded must survive a restart: it is recorded once.

The fact comes before the first failure of its round, or not at all: see RoundFinalized in journal.proto.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rallypoint.rendezvous.core import facts
from rallypoint.rendezvous.core.state import Phase, RecoveryParts, RunState


@dataclass(frozen=True, slots=True)
class StartReport:
    """A node's report that all its workers in a round have started, `age` seconds before it was sent."""

    round: int
    parts: RecoveryParts
    age: float = 0.0


def note(state: RunState, node_id: str, report: StartReport, now: float) -> bool:
    """Note a report of a node that holds its lease; one that repeats another, or is of another round, is ignored.

    Returns True if the run must be settled: all participants have reported.
    """
    if state.phase is not Phase.FINAL or report.round != state.round:
        return False
    if state.start_recorded or state.breach is not None:
        return False
    # A node that joined after the round froze, under the name of a participant, has no seat in it.
    seated = node_id in state.seats and state.nodes[node_id].lease < state.fencing_token
    if not seated or node_id in state.started:
        return False
    state.started.add(node_id)
    now += state.forgiven
    state.last_start_at = max(state.last_start_at, now - report.age, min(state.final_at, now))
    if state.slowest is None or report.parts.own > state.slowest[1].own:
        state.slowest = node_id, report.parts
    return _all_reported(state)


def _all_reported(state: RunState) -> bool:
    # Compares the sizes first: n reports cost O(n) together.
    return state.seats.keys() <= state.started


def to_record(state: RunState, now: float, *, over: bool) -> facts.RoundStarted | None:
    """Return the fact about the start of the round if it is due; `over`: the round ends, or fails, now."""
    if state.phase is not Phase.FINAL or state.start_recorded or state.failure is not None:
        return None
    if state.slowest is None or not (over or _all_reported(state)):
        return None
    ended_at = state.former_ended_at
    return facts.RoundStarted(
        state.round,
        state.group_world_size,
        len(state.started),
        *state.slowest,
        duration=max(0.0, state.last_start_at - ended_at) if ended_at > -math.inf else 0.0,
        age=max(0.0, now + state.forgiven - state.last_start_at),
    )


def forget(state: RunState, *, recorded: bool) -> None:
    """Forget the reports: they are recorded, or their round is over."""
    state.start_recorded = recorded
    state.started, state.slowest, state.last_start_at = set(), None, -math.inf
