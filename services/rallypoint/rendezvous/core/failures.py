"""Failures of workers: which of them came first, over all nodes, and what a round's failure means for the run.

A host's clock is never compared with another's: a failure is put to the server's clock, by when its report came and
how old it was then. What is on its way for long looks later than it was, by that much.
"""

from __future__ import annotations

from dataclasses import replace

from rallypoint.rendezvous.core import facts, newcomers
from rallypoint.rendezvous.core.facts import explain_failure, explain_spent, explain_worn_out
from rallypoint.rendezvous.core.state import (
    FailedWorker,
    FailureKind,
    FailureRestart,
    Outcome,
    Phase,
    RoundEnd,
    RoundEndCause,
    RunEnd,
    RunSettings,
    RunState,
    WorkerFailure,
)

# ---- Restarts for a failure: which still count against a budget, and how long the next one is held back.


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
        state.restarts.append(FailureRestart(round_, node_id, max(latest, at)))


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


SETTLING = 0.5
"""Seconds that the end of a run waits for what other nodes have to report. Workers die of another's failure within
milliseconds, and their agents report it as soon. Longer delays the end of every failed run; shorter, and a report that
was held up comes too late to name the failure that was the first."""

MOST_FAILURES = 16
"""Failures of one round that are kept, but for the first: when one worker of 10,000 fails, all others may follow."""

MOST_EVICTED = 1_000
"""Nodes that one run can refuse."""


def take(
    state: RunState, node_id: str, failure: WorkerFailure, now: float, *, running: bool
) -> facts.WorkerFailed | None:
    """What a report comes to, of a node that holds its lease; `running`: the round that it is of is FINAL."""
    if not running and not _late(state, node_id, failure.round):
        return None
    if failed_worker(state, node_id, failure) in state.failed_workers:
        return None  # said again
    earliest = state.failure is None or failed_at(state, failure, now) < state.first_failed_at
    unmendable = failure.permanent and state.permanent_failure is None
    if len(state.failed_workers) >= MOST_FAILURES and not (earliest or unmendable):
        return None
    return facts.WorkerFailed(failure, earliest)


def _late(state: RunState, node_id: str, round_: int) -> bool:
    """Whether the round has just ended for a failure, and the node was in it under its present lease."""
    end, node = state.last_round_end, state.nodes[node_id]
    return (
        state.phase in (Phase.JOINABLE, Phase.FROZEN)
        and end is not None
        and (end.round, end.cause) == (round_, RoundEndCause.WORKER_FAILED)
        and node_id in state.former_ranks
        and node.lease < state.former_fencing_token
    )


def failed_worker(state: RunState, node_id: str, failure: WorkerFailure) -> FailedWorker:
    """The worker that a report is about; whatever number it gives, a node has no more workers than it joined with."""
    node = state.nodes.get(node_id)
    workers = node.local_world_size if node is not None else 1
    return FailedWorker(node_id, min(max(failure.local_rank, 0), workers - 1))


def failed_at(state: RunState, failure: WorkerFailure, now: float) -> float:
    """When a worker failed whose report comes now: not later than that, and not before its round began.

    By the clock that forgives no pauses: by the other, what failed before one would seem to have failed after it.
    """
    now += state.forgiven
    return max(now - max(0.0, failure.age), min(state.final_at, now))


def participants(state: RunState) -> set[str]:
    """Return the nodes of a FINAL round whose workers are to run: they hold the lease of their seat, and stay."""
    return {node_id for node_id in state.seats if _takes_part(state, node_id)}


def _takes_part(state: RunState, node_id: str) -> bool:
    node = state.nodes.get(node_id)
    # A node that joined after the round froze, under the name of a participant, has no seat in it.
    seated = node is not None and node_id in state.seats and node.lease < state.fencing_token
    return seated and node_id not in state.succeeded and node_id not in state.departing


def misses_participant(state: RunState) -> bool:
    """Return whether the stream of a participant is broken: if that node is lost, it is why the workers failed."""
    return any(_takes_part(state, node_id) for node_id in state.disconnected)


def is_settled(state: RunState, now: float) -> bool:
    """Return whether no participant can report an earlier failure, or turn out to have been lost before the failure.

    Each must have shown a sign of life since the failure was reported; its lease bounds the wait for that.
    """
    if state.group_world_size == 1:
        return True
    if state.silent or misses_participant(state):
        return False
    if state.settle_deadline is None or now >= state.settle_deadline:
        return True
    # The streams of participants that have reported may break yet: a host's workers may die before its agent.
    assert state.failure is not None, "the round failed"
    return participants(state) <= {state.failure.node_id}


def failed_round_of(state: RunState, node_id: str) -> int:
    """Return the round whose workers failed because this node, which is lost now, was gone; 0: none did.

    Workers fail of a lost peer long before the service knows that its host is lost: a connection is reset within
    milliseconds, and a lease outlives a network cut by seconds.
    """
    node = state.nodes[node_id]
    if state.failure is None or node_id in state.departing:
        return 0
    if state.phase is Phase.FINAL:
        failed = state.settling and _takes_part(state, node_id)
        return state.round if failed else 0
    if node_id not in state.former_ranks or node.lease > state.former_fencing_token:
        return 0
    reported_at = state.failure_reported_at
    broken = node.broken_at is not None and node.broken_at <= reported_at + SETTLING
    return state.counted_round if broken or node.seen_at <= reported_at else 0


def end_of_failed_round(state: RunState, breach: RoundEnd, now: float) -> facts.Fact | None:
    """What becomes of a FINAL round of which a worker failed; None: that is not settled yet.

    A restart is told at once. What can't be taken back waits until it is settled whose failure was the first.
    """
    failure, settings = state.failure, state.settings
    assert failure is not None, "the round failed"
    if state.permanent_failure is None and misses_participant(state):
        return None  # until it is back, or lost
    worn_out = _wears_out(state, failure.node_id)
    used = counted(state)
    if state.permanent_failure is None and failure.kind is FailureKind.PORT_TAKEN:
        # No worker did anything wrong. The next round has another port; should that be taken too, back-off bounds it.
        return ended(state, breach, now)
    if state.permanent_failure is None and not worn_out and used < settings.max_restarts:
        return ended(state, breach, now, cost=1)
    if not is_settled(state, now):
        return None
    if state.permanent_failure is not None:
        return unmendable_end(state.permanent_failure)
    if worn_out:
        node = state.nodes.get(failure.node_id)
        failed = counted_of(state, failure.node_id) + 1
        reason = explain_worn_out(failed, settings.restart_window, failure)
        return facts.NodeEvicted(failure.node_id, reason, node.lease if node else 0, by_service=True)
    spent = explain_spent(settings.max_restarts, settings.restart_window)
    return facts.RunClosed(RunEnd(Outcome.FAILED, f"{explain_failure(failure)}; {spent}", failure))


def ended(state: RunState, end: RoundEnd, now: float, cost: int = 0) -> facts.RoundEnded:
    """Return the fact that the present round ends so, which costs so many restarts."""
    failed_scale_ups, passed = newcomers.count_after(state, end, now)
    quick = quick_restarts_after(state, end.cause, now)
    if cost and failed_scale_ups > state.failed_scale_ups:
        quick -= 1  # the others need not wait: they restart without it
    return facts.RoundEnded(
        end,
        restart_count=state.restart_count + cost,
        counted_restarts=counted(state) + cost,
        quick_restarts=quick,
        failed_scale_ups=failed_scale_ups,
        newcomers_passed=passed,
    )


def unmendable_end(failure: WorkerFailure) -> facts.RunClosed:
    """The end of a run by a failure that no restart can mend."""
    detail = f"{explain_failure(failure)}; no restart can mend that, says the worker"
    return facts.RunClosed(RunEnd(Outcome.FAILED, detail, failure))


def _wears_out(state: RunState, node_id: str) -> bool:
    """Whether another failure is one too many for its node."""
    most = state.settings.max_restarts_per_node
    may_be_refused = node_id not in state.evicted and len(state.evicted) < MOST_EVICTED
    return 0 < most <= counted_of(state, node_id) and may_be_refused
