"""Newcomers: when one may end a running round, and the back-off of those that fail soon.

A newcomer is on probation until a round with it has run for `PROBATION`; the nodes of a run's first round are not. If
it is lost before, leaves, or has the first worker that fails, the scale-up failed: the others re-form without a last
call, and further newcomers are delayed, longer each time:

    failures in a row, over all nodes    1   2   3    4    5    6 …
    delay, seconds                       0   60  120  240  480  600

Each node is also delayed by its own count, for up to an hour. So a host that joins and dies, again and again, costs the
others a small share of their time, under any name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rallypoint.rendezvous.core.state import (
    Node,
    Phase,
    RoundEnd,
    RoundEndCause,
    RunState,
    ScaleUpPolicy,
    Seat,
)

READY_AFTER = 3.0
"""Seconds that a newcomer must have been connected before a round ends for it. A process that dies at its start is gone
by then; longer keeps every good host idle for as long."""

PROBATION = 60.0
"""Seconds that a round must run for its newcomers to pass. Longer than a job takes to load, so that a host on which it
cannot run is found; much longer, and an unrelated loss counts against newcomers."""

_FIRST_HOLD = 60.0
_LONGEST_HOLD = 600.0
_LONGEST_HOLD_OF_NODE = 3600.0

MOST_NODES = 1_000
"""Nodes for which one run remembers failures on probation."""


def count_after(state: RunState, end: RoundEnd, now: float) -> tuple[int, bool]:
    """Return the number of failed scale-ups in a row after `end` of the present round, and whether newcomers passed."""
    ran = now + state.forgiven - state.final_at if state.phase is Phase.FINAL else 0.0
    passed = ran >= PROBATION
    if not passed and end.node_id in state.newcomers and _fails_scale_up(state, end):
        return state.failed_scale_ups + 1, False
    good = passed and state.newcomers
    long_ago = ran >= 2 * _hold(state.failed_scale_ups, _LONGEST_HOLD) > 0
    return (0 if good or long_ago else state.failed_scale_ups), passed


def _fails_scale_up(state: RunState, end: RoundEnd) -> bool:
    if end.cause is RoundEndCause.WORKER_FAILED:
        # A failure is attributed to its node only if others have run well, and can go on without it.
        return len(state.seats.keys() - state.newcomers) >= state.settings.min_nodes
    return end.cause in (RoundEndCause.NODE_LOST, RoundEndCause.NODE_LEFT, RoundEndCause.NODE_EVICTED)


def note_end(state: RunState, end: RoundEnd, count: int, passed: bool, now: float) -> bool:
    """Update the counts of newcomers after the end of a round; returns True if a scale-up failed."""
    failed = count > state.failed_scale_ups
    state.failed_scale_ups = count
    if failed:
        of_node = state.failed_scale_ups_of.pop(end.node_id, 0) + 1
        state.failed_scale_ups_of[end.node_id] = of_node
        if len(state.failed_scale_ups_of) > MOST_NODES:
            oldest = next(iter(state.failed_scale_ups_of))
            del state.failed_scale_ups_of[oldest]
            state.held_until_of.pop(oldest, None)
        hold_back(state, end.node_id, now)
        others = (state.nodes.get(node_id) for node_id in state.newcomers if node_id != end.node_id)
        state.excused = {node.lease for node in others if node is not None}
    elif count == 0:
        state.newcomers_held_until = -math.inf
    if passed:
        for node_id in state.newcomers:
            state.failed_scale_ups_of.pop(node_id, None)
            state.held_until_of.pop(node_id, None)
        state.newcomers = set()
    return failed


def forget_failures(state: RunState) -> None:
    """End the delays of a run and of all its nodes: an operator may have repaired a host."""
    state.failed_scale_ups, state.newcomers_held_until = 0, -math.inf
    state.failed_scale_ups_of, state.held_until_of = {}, {}


def hold_back(state: RunState, node_id: str, now: float) -> None:
    """Start the delays that follow from the counts of a run and of one of its nodes."""
    state.newcomers_held_until = now + _hold(state.failed_scale_ups, _LONGEST_HOLD)
    state.held_until_of[node_id] = now + _hold(state.failed_scale_ups_of[node_id], _LONGEST_HOLD_OF_NODE)


def _hold(count: int, longest: float) -> float:
    """Seconds that newcomers are delayed after `count` failures in a row."""
    # 2**40 seconds are longer than any hold: past it only the float would overflow.
    return 0.0 if count < 2 else min(_FIRST_HOLD * 2.0 ** min(count - 2, 40), longest)


def _held_until(state: RunState, node: Node) -> float:
    """The time until which a node is delayed; -inf: it is not."""
    of_node = state.held_until_of.get(node.node_id, -math.inf)
    # A newcomer that was in a round with the failed one is not delayed with it: it would be admitted together with the
    # next bad one, again and again, and never run.
    excused = survived(state, node) or node.lease in state.excused
    return of_node if excused else max(of_node, state.newcomers_held_until)


def of_round(state: RunState, seats: Sequence[Seat]) -> set[str]:
    """Return the newcomers among the participants of a round that freezes; the first round of a run has none."""
    if state.former_fencing_token == 0:
        return set()
    ids = (seat.node_id for seat in seats)
    return {each for each in ids if each in state.newcomers or not survived(state, state.nodes[each])}


def survived(state: RunState, node: Node) -> bool:
    """True if a node was in the last round, under its present lease."""
    return node.node_id in state.former_ranks and node.lease < state.former_fencing_token


def admissible(state: RunState, now: float) -> list[Node]:
    """Return the newcomers that a round would admit now, in the order of joining."""
    return [node for node in state.waiting if node.connected and _held_until(state, node) <= now]


def next_scale_up(state: RunState) -> float | None:
    """The time at which the present round ends for newcomers; None: not for those that wait now.

    A round without room ends for none; nor does one with a participant that has succeeded, for the run is about to
    end and a restart would lose work.
    """
    settings = state.settings
    if state.phase is not Phase.FINAL or state.breach is not None or state.finishing or not state.has_room:
        return None
    if settings.scale_up_policy is ScaleUpPolicy.ON_RESTART:
        return None
    due = min((_ready_at(state, node) for node in state.waiting if node.connected), default=None)
    if due is None:
        return None
    if settings.scale_up_policy is ScaleUpPolicy.DELAYED and state.present < settings.max_nodes:
        assert state.scale_up_deadline is not None, "the scale-up delay runs while there is room"
        return max(due, state.scale_up_deadline)
    return due


def held_back(state: RunState, now: float) -> set[str]:
    """Return the connected newcomers that are excluded from the next round by a delay.

    Nodes of the last round never are: their old workers may run, and only their confirmation shows that these stopped.
    """
    if now >= max(state.newcomers_held_until, *state.held_until_of.values(), -math.inf):
        return set()
    return {
        node_id
        for node_id, node in state.nodes.items()
        if node.connected
        and node_id not in state.departing
        and not survived(state, node)
        and _held_until(state, node) > now
    }


def _ready_at(state: RunState, node: Node) -> float:
    return max(node.connected_at + READY_AFTER, _held_until(state, node))
