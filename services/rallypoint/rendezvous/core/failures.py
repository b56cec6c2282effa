"""Failures of workers: which of them came first, over all nodes, and whether the round restarts or the run ends.

Clocks of two hosts are never compared: the time of a failure, on the server's clock, is the arrival of its report minus
the age in the report. A delay on the network makes a failure look later than it was, by that much.
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
    ReportedFailure,
    RoundEnd,
    RoundEndCause,
    RunEnd,
    RunSettings,
    RunState,
)

# ---- Restarts after failures: which still count against a budget, and how long the next one is delayed (back-off).


STEADY_AFTER = 60.0
"""Least seconds that a round must run for its failure not to count as quick. Longer than a job takes to load and to
reach the cause of its failure; much longer, and two unrelated failures delay a restart."""

_FIRST_HOLD = 1.0


def are_kept(settings: RunSettings) -> bool:
    """True if restarts are kept one by one; otherwise their number is enough."""
    return settings.restart_window > 0 or settings.max_restarts_per_node > 0


def counted(state: RunState) -> int:
    """Number of restarts that count against the run's budget."""
    return len(state.restarts) if state.settings.restart_window > 0 else state.restart_count


def counted_of(state: RunState, node_id: str) -> int:
    """Number of restarts that count against a node's budget; 0 if nodes have none."""
    if state.settings.max_restarts_per_node == 0:
        return 0
    return sum(restart.node_id == node_id for restart in state.restarts)


def note(state: RunState, round_: int, node_id: str, at: float) -> None:
    """Add a restart that happened `at` (monotonic seconds); never earlier than the one before."""
    if are_kept(state.settings):
        latest = state.restarts[-1].at if state.restarts else at
        state.restarts.append(FailureRestart(round_, node_id, max(latest, at)))


def blame(state: RunState, round_: int, node_id: str) -> None:
    """Count the restart after a round against another node than before."""
    state.restarts = [
        replace(each, node_id=node_id) if each.round == round_ else each for each in state.restarts
    ]


def forgive(state: RunState, round_: int) -> None:
    """No longer count the restart after a round: no worker was its cause."""
    state.restart_count -= 1
    state.quick_restarts = max(0, state.quick_restarts - 1)
    state.restarts = [each for each in state.restarts if each.round != round_]


def absolve(state: RunState, node_id: str) -> None:
    """No longer count any restart against a node; against the run they still count."""
    state.restarts = [
        replace(each, node_id="") if each.node_id == node_id else each for each in state.restarts
    ]


def forget_old(state: RunState, now: float) -> None:
    """Drop the restarts that have left the window."""
    window = state.settings.restart_window
    if window > 0 and state.restarts and state.restarts[0].at + window <= now:
        state.restarts = [each for each in state.restarts if each.at + window > now]


def next_to_be_forgotten(state: RunState) -> float | None:
    """The time when the next restart leaves the window, monotonic seconds; None: no restart will."""
    window = state.settings.restart_window
    return state.restarts[0].at + window if window > 0 and state.restarts else None


def hold(settings: RunSettings, quick_restarts: int) -> float:
    """Seconds of back-off after 0, 1, 2 … quick restarts in a row: 0, 0, 1, 2, 4, 8 … up to restart_backoff."""
    if quick_restarts < 2:
        return 0.0
    # 2**40 seconds are longer than any back-off: past it only the float would overflow.
    return min(_FIRST_HOLD * 2.0 ** min(quick_restarts - 2, 40), settings.restart_backoff)


def held_back(state: RunState) -> float:
    """Seconds of back-off before the present round forms, from the end of the one before; 0: none."""
    end = state.last_round_end
    if state.phase is not Phase.JOINABLE or end is None or end.cause is not RoundEndCause.WORKER_FAILED:
        return 0.0
    return hold(state.settings, state.quick_restarts)


def quick_restarts_after(state: RunState, cause: RoundEndCause, now: float) -> int:
    """Number of quick restarts in a row, once the present round has ended for that cause.

    A round that ran for a while resets it, as does an operator's restart, which may follow a repair. A change of
    membership does not: it does not explain why the workers fail.
    """
    ran = now + state.forgiven - state.final_at if state.phase is Phase.FINAL else 0.0
    steady = ran >= max(STEADY_AFTER, 2 * hold(state.settings, state.quick_restarts))
    before = 0 if steady or cause is RoundEndCause.RESTART_REQUESTED else state.quick_restarts
    return before + (cause is RoundEndCause.WORKER_FAILED)


SETTLE_WINDOW = 0.5
"""Seconds that the end of a run waits for reports of other nodes. When one worker fails, its peers die within
milliseconds, and their agents report that as quickly. Longer delays the end of every failed run; shorter, and a delayed
report comes too late to be recognized as the first failure."""

MOST_FAILURES = 16
"""Kept failures of one round besides the first: when one worker of 10,000 fails, all others may follow."""

MOST_EVICTED = 1_000
"""Nodes that one run can refuse."""


def take(
    state: RunState, node_id: str, failure: ReportedFailure, now: float, *, running: bool
) -> facts.WorkerFailed | None:
    """Return the fact for a report by a node that holds its lease, or None; `running`: its round is FINAL."""
    if not running and not _late(state, node_id, failure.round):
        return None
    if failed_worker(state, node_id, failure) in state.failed_workers:
        return None  # a repeated report
    earliest = state.failure is None or failed_at(state, failure, now) < state.first_failed_at
    first_permanent = failure.permanent and state.permanent_failure is None
    if len(state.failed_workers) >= MOST_FAILURES and not (earliest or first_permanent):
        return None
    return facts.WorkerFailed(failure, earliest)


def _late(state: RunState, node_id: str, round_: int) -> bool:
    """True if the round has just ended with a failure, and the node was in it under its present lease."""
    end, node = state.last_round_end, state.nodes[node_id]
    return (
        state.phase in (Phase.JOINABLE, Phase.FROZEN)
        and end is not None
        and (end.round, end.cause) == (round_, RoundEndCause.WORKER_FAILED)
        and node_id in state.former_ranks
        and node.lease < state.former_fencing_token
    )


def failed_worker(state: RunState, node_id: str, failure: ReportedFailure) -> FailedWorker:
    """Return the worker of a report; its rank is clipped, since a node has no more workers than it joined with."""
    node = state.nodes.get(node_id)
    workers = node.local_world_size if node is not None else 1
    return FailedWorker(node_id, min(max(failure.local_rank, 0), workers - 1))


def failed_at(state: RunState, failure: ReportedFailure, now: float) -> float:
    """The time of a failure that is reported now: not later than now, and not before its round began.

    By the clock that forgives no pauses: by the other, a failure before a pause would seem to come after it.
    """
    now += state.forgiven
    return max(now - max(0.0, failure.age), min(state.final_at, now))


def participants(state: RunState) -> set[str]:
    """Return the nodes of a FINAL round whose workers should run: they hold the lease of their seat, and stay."""
    return {node_id for node_id in state.seats if _takes_part(state, node_id)}


def _takes_part(state: RunState, node_id: str) -> bool:
    return _has_workers(state, node_id) and node_id not in state.departing


def _has_workers(state: RunState, node_id: str) -> bool:
    """True if workers of the round are on this node; those of a departing one may have ended already."""
    node = state.nodes.get(node_id)
    # A node that joined after the round froze, under the name of a participant, has no seat in it.
    seated = node is not None and node_id in state.seats and node.lease < state.fencing_token
    return seated and node_id not in state.succeeded


def misses_participant(state: RunState) -> bool:
    """True if the stream of a node with workers is broken: if that node is lost, its loss is why other workers failed.

    A departing node reports that before it stops its workers, but a server that was paused reads the failure of their
    peers in the same moment, or before.
    """
    return any(_has_workers(state, node_id) for node_id in state.disconnected)


def await_signs_of_life(state: RunState) -> None:
    """Have the failed round wait for a sign of life of each participant that has not reported a failure.

    It begins to wait again when the participants are informed of the failure, which they answer at once. A message that
    is read before that, for example right after a pause of the server, may be one of a lost host that had waited.
    """
    state.silent = participants(state) - {each.node_id for each in state.failed_workers}


def is_settled(state: RunState, now: float) -> bool:
    """True if no participant can report an earlier failure, or turn out to have been lost before the failure.

    Each must have given a sign of life since the failure was reported; its lease bounds the wait for that.
    """
    if state.group_world_size == 1:
        return True
    if state.silent or misses_participant(state):
        return False
    if state.settle_deadline is None or now >= state.settle_deadline:
        return True
    # The streams of participants that have reported may still break: a host's workers may die before its agent.
    assert state.failure is not None, "the round failed"
    return participants(state) <= {state.failure.node_id}


def failed_round_of(state: RunState, node_id: str) -> int:
    """Return the round whose workers failed because this node, which is lost now, was gone; 0: none.

    Workers fail because of a lost peer long before the service detects the loss of its host: a connection is reset
    within milliseconds, and a lease outlives a network cut by seconds.
    """
    node = state.nodes[node_id]
    if state.failure is None:
        return 0
    if state.phase is Phase.FINAL:
        failed = state.settling and _has_workers(state, node_id)
        return state.round if failed else 0
    if node_id not in state.former_ranks or node.lease > state.former_fencing_token:
        return 0
    # Messages of two hosts are read in any order: soon after the report, a sign of life may be older than it.
    latest = state.failure_reported_at + SETTLE_WINDOW
    broken = node.broken_at is not None and node.broken_at <= latest
    return state.counted_round if broken or node.seen_at <= latest else 0


def end_of_failed_round(state: RunState, breach: RoundEnd, now: float) -> facts.Fact | None:
    """Return the next fact of a FINAL round with a failed worker; None: the cause is not settled yet.

    A restart is announced at once. An end that can't be taken back waits until the first failure is settled.
    """
    failure, settings = state.failure, state.settings
    assert failure is not None, "the round failed"
    if state.permanent_failure is None and misses_participant(state):
        return None  # until its stream is back, or it is lost
    worn_out = _wears_out(state, failure.node_id)
    used = counted(state)
    if state.permanent_failure is None and failure.kind is FailureKind.PORT_TAKEN:
        # No worker is at fault. The next round uses another port; if that is taken too, back-off limits the retries.
        return ended(state, breach, now)
    if state.permanent_failure is None and not worn_out and used < settings.max_restarts:
        return ended(state, breach, now, cost=1)
    if not is_settled(state, now):
        return None
    if state.permanent_failure is not None:
        return end_by_permanent_failure(state.permanent_failure)
    if worn_out:
        node = state.nodes.get(failure.node_id)
        failed = counted_of(state, failure.node_id) + 1
        reason = explain_worn_out(failed, settings.restart_window, failure)
        return facts.NodeEvicted(failure.node_id, reason, node.lease if node else 0, by_service=True)
    spent = explain_spent(settings.max_restarts, settings.restart_window)
    return facts.RunClosed(RunEnd(Outcome.FAILED, f"{explain_failure(failure)}; {spent}", failure))


def ended(state: RunState, end: RoundEnd, now: float, cost: int = 0) -> facts.RoundEnded:
    """Return the fact that ends the present round with `end`; `cost`: restarts that it uses up."""
    failed_scale_ups, passed = newcomers.count_after(state, end, now)
    quick = quick_restarts_after(state, end.cause, now)
    if cost and failed_scale_ups > state.failed_scale_ups:
        quick -= 1  # no back-off for the other nodes: they restart without the failed newcomer
    return facts.RoundEnded(
        end,
        restart_count=state.restart_count + cost,
        counted_restarts=counted(state) + cost,
        quick_restarts=quick,
        failed_scale_ups=failed_scale_ups,
        newcomers_passed=passed,
    )


def end_by_permanent_failure(failure: ReportedFailure) -> facts.RunClosed:
    """Return the end of a run after a failure that its worker reported as permanent."""
    detail = f"{explain_failure(failure)}; reported as permanent, so not restarted"
    return facts.RunClosed(RunEnd(Outcome.FAILED, detail, failure))


def _wears_out(state: RunState, node_id: str) -> bool:
    """True if another failure exceeds its node's budget."""
    most = state.settings.max_restarts_per_node
    may_be_refused = node_id not in state.evicted and len(state.evicted) < MOST_EVICTED
    return 0 < most <= counted_of(state, node_id) and may_be_refused
