"""Restarts for a failure: which still count against a budget, and how long the next one is held back."""

from __future__ import annotations

from dataclasses import replace

from rallypoint.rendezvous.core.state import Phase, Restart, RoundEndCause, RunSettings, RunState

STEADY_AFTER = 60.0
"""Seconds that a round must run, at the least, for its failure not to count as one soon after the one before. Longer
than a job takes to load and to reach what it failed of; much longer, and two failures that have nothing to do with one
another hold a restart back."""

_FIRST_HOLD = 1.0


def are_kept(settings: RunSettings) -> bool:
    """Whether restarts are kept one by one; otherwise their number is enough."""
    return settings.restart_window > 0 or settings.max_restarts_per_node > 0


def counted(state: RunState) -> int:
    """How many restarts count against the run's budget."""
    return len(state.restarts) if state.settings.restart_window > 0 else state.restart_count


def counted_of(state: RunState, node_id: str) -> int:
    """How many restarts count against a node's budget; 0 where nodes have none."""
    if state.settings.max_restarts_per_node == 0:
        return 0
    return sum(restart.node_id == node_id for restart in state.restarts)


def note(state: RunState, round_: int, node_id: str, at: float) -> None:
    """Take a restart down, which happened at that time (monotonic seconds), after all that are there."""
    if are_kept(state.settings):
        latest = state.restarts[-1].at if state.restarts else at
        state.restarts.append(Restart(round_, node_id, max(latest, at)))


def blame(state: RunState, round_: int, node_id: str) -> None:
    """Count the restart after a round against another node than before."""
    state.restarts = [
        replace(each, node_id=node_id) if each.round == round_ else each for each in state.restarts
    ]


def forgive(state: RunState, round_: int) -> None:
    """Count the restart after a round no longer: no worker was its cause."""
    state.restart_count -= 1
    state.quick_restarts = max(0, state.quick_restarts - 1)
    state.restarts = [each for each in state.restarts if each.round != round_]


def absolve(state: RunState, node_id: str) -> None:
    """Count no restart against a node any more; against the run they go on counting."""
    state.restarts = [
        replace(each, node_id="") if each.node_id == node_id else each for each in state.restarts
    ]


def forget_old(state: RunState, now: float) -> None:
    """Drop the restarts that have left the window."""
    window = state.settings.restart_window
    if window > 0 and state.restarts and state.restarts[0].at + window <= now:
        state.restarts = [each for each in state.restarts if each.at + window > now]


def next_to_be_forgotten(state: RunState) -> float | None:
    """When the next restart leaves the window; None: there is none that will."""
    window = state.settings.restart_window
    return state.restarts[0].at + window if window > 0 and state.restarts else None


def hold(settings: RunSettings, quick_restarts: int) -> float:
    """How long a restart is held back, seconds, so many in a row having come soon: 0, 1, 2, 4 … restart_backoff."""
    if quick_restarts < 2:
        return 0.0
    # 2**40 seconds are longer than any back-off: past it only the float would overflow.
    return min(_FIRST_HOLD * 2.0 ** min(quick_restarts - 2, 40), settings.restart_backoff)


def held_back(state: RunState) -> float:
    """How long the next round is, or was, held back from the end of the one before, seconds; 0: not at all."""
    end = state.last_round_end
    if state.phase is not Phase.JOINABLE or end is None or end.cause is not RoundEndCause.WORKER_FAILED:
        return 0.0
    return hold(state.settings, state.quick_restarts)


def quick_restarts_after(state: RunState, cause: RoundEndCause, now: float) -> int:
    """How many restarts in a row come soon, once the present round has ended for that cause.

    A round that ran for a while breaks the row, as does an operator's restart, for something may have been mended.
    A change of membership does not: it says nothing of why the workers fail.
    """
    ran = now + state.forgiven - state.final_at if state.phase is Phase.FINAL else 0.0
    steady = ran >= max(STEADY_AFTER, 2 * hold(state.settings, state.quick_restarts))
    before = 0 if steady or cause is RoundEndCause.RESTART_REQUESTED else state.quick_restarts
    return before + (cause is RoundEndCause.WORKER_FAILED)
