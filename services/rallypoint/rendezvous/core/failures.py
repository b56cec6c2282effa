"""Failures of workers: which of them came first, over all nodes, and what a round's failure means for the run.

A host's clock is never compared with another's: a failure is put to the server's clock, by when its report came and
how old it was then. What is on its way for long looks later than it was, by that much.
"""

from __future__ import annotations

from rallypoint.rendezvous.core import facts, newcomers, restarts
from rallypoint.rendezvous.core.explain import explain_failure, explain_spent, explain_worn_out
from rallypoint.rendezvous.core.state import (
    FailedWorker,
    FailureKind,
    Outcome,
    Phase,
    RoundEnd,
    RoundEndCause,
    RunEnd,
    RunState,
    WorkerFailure,
)

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
    used = restarts.counted(state)
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
        failed = restarts.counted_of(state, failure.node_id) + 1
        reason = explain_worn_out(failed, settings.restart_window, failure)
        return facts.NodeEvicted(failure.node_id, reason, node.lease if node else 0, by_service=True)
    spent = explain_spent(settings.max_restarts, settings.restart_window)
    return facts.RunClosed(RunEnd(Outcome.FAILED, f"{explain_failure(failure)}; {spent}", failure))


def ended(state: RunState, end: RoundEnd, now: float, cost: int = 0) -> facts.RoundEnded:
    """Return the fact that the present round ends so, which costs so many restarts."""
    failed_scale_ups, passed = newcomers.count_after(state, end, now)
    quick = restarts.quick_restarts_after(state, end.cause, now)
    if cost and failed_scale_ups > state.failed_scale_ups:
        quick -= 1  # the others need not wait: they restart without it
    return facts.RoundEnded(
        end,
        restart_count=state.restart_count + cost,
        counted_restarts=restarts.counted(state) + cost,
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
    return 0 < most <= restarts.counted_of(state, node_id) and may_be_refused
