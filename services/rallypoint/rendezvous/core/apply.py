"""The fold: `apply` changes a run's state by a fact."""

from __future__ import annotations

import heapq
import math
from dataclasses import fields, replace
from functools import singledispatch

from rallypoint.rendezvous.core import facts, failures, newcomers, starts
from rallypoint.rendezvous.core.facts import explain_eviction, explain_failure, explain_loss
from rallypoint.rendezvous.core.state import (
    EndedIncarnation,
    Eviction,
    LossReason,
    Node,
    Phase,
    ReportedFailure,
    RoundEnd,
    RoundEndCause,
    RunState,
    ScaleUpPolicy,
)

# ---- Signs of life of nodes, which keep leases alive. None of them is a fact; see `RunState`.


LEAST_TERM_AFTER_RESTART = 10.0
"""The least seconds of a lease after its server has started again, even if its term is shorter. Nodes don't know when:
each waits up to some 2 s before it tries again, and takes longer on a network that is in trouble too. Longer keeps a
node that died meanwhile in its round for as long."""

LONG_PAUSE = 3.0
"""Seconds, as forgiven, from which a pause of the server may have broken streams: clients give up a connection that
answers no ping for 5 s, and other clients perhaps sooner. After a shorter pause streams are as they were."""

# Seconds after which a message shows that a stream stands. The first ones may come from a client that has given it up.
_STANDING = 1.0

# Seconds without a returning node after which all are back that will be. A herd comes at once, but a busy machine may
# stall for some of them; longer keeps a node that died meanwhile in its round for as long.
_ALL_BACK = 5.0
# Seconds after a pause at which leases end again, even if nodes come and go all the time.
_LONGEST_SPARED = 60.0


def enqueue(state: RunState, node: Node) -> None:
    """Put a lease into the queue under its present deadline; its entry before becomes dead."""
    node.queued_deadline = node.lease_deadline
    heapq.heappush(state.lease_queue, (node.lease_deadline, node.node_id, node.lease))


def renew(state: RunState, node_id: str, now: float) -> bool:
    """Renew the lease of a node after a sign of life: it gets a full new term.

    Returns True if the run must be settled: it waited for this node, or the lease ends earlier than scheduled.
    """
    node = state.holders[node_id]
    was_missed = not node.connected or node_id in state.silent
    if not node.connected:
        node.connected_at, node.broken_at = now, None
        state.disconnected.discard(node_id)
    elif now >= node.connected_at + _STANDING:
        node.spared_until = -math.inf
    state.silent.discard(node_id)
    node.seen_at = now + state.forgiven
    node.loss_if_expired = LossReason.LEASE_EXPIRED
    # The queue keeps the older, earlier entry; when that comes up it is put back with this deadline. So a heartbeat
    # costs no queue operation, except the first one after a restart, which may bring the deadline nearer.
    node.lease_deadline = now + state.settings.time_to_live
    nearer = node.lease_deadline < node.queued_deadline
    if nearer:
        enqueue(state, node)
    return nearer or was_missed


def note_broken(state: RunState, node_id: str, now: float) -> None:
    """Note that a node has no stream; its lease keeps its remaining time."""
    state.holders[node_id].broken_at = now + state.forgiven
    state.disconnected.add(node_id)


def disconnect(state: RunState, node_id: str, now: float) -> None:
    """Note that a node's stream broke: its lease keeps at most the disconnect grace of its remaining time.

    Not after a restart of the service, if all that came from the node is a request to resume. It may be an old one of a
    client that has given it up, and now waits longer than the grace before the next.
    """
    note_broken(state, node_id, now)
    node = state.holders[node_id]
    grace = max(now + state.settings.disconnect_grace, node.spared_until)
    if grace < node.lease_deadline:
        node.loss_if_expired, node.lease_deadline = LossReason.DISCONNECTED, grace
    enqueue(state, node)


def suspend_leases(state: RunState) -> None:
    """End no more leases: heartbeats are no longer read. The server that comes next gives each node a full term.

    No sign of life is noted: a host that vanished earlier must stay the cause of the failures that followed.
    """
    for node in state.holders.values():
        node.lease_deadline = math.inf


def prune(state: RunState, now: float) -> None:
    """Bring the head of the lease queue up to date: remove dead entries, move those of renewed leases back."""
    queue = state.lease_queue
    while queue and queue[0][0] <= now:
        deadline, node_id, lease = queue[0]
        node = state.holders.get(node_id)
        if node is None or node.lease != lease or node.queued_deadline != deadline:
            heapq.heappop(queue)
        elif node.lease_deadline > deadline:
            heapq.heappop(queue)
            enqueue(state, node)
        else:
            return


def restart_leases(state: RunState, now: float, least: float = LEAST_TERM_AFTER_RESTART) -> None:
    """Give every lease a full new term, at least `least` seconds: while the server was away it saw no sign of life.

    Nor does it know when the round began. The first known failure stays the first: a failure that is reported from now
    on could be older only by the time that the server was away.
    """
    state.lease_queue = []
    state.final_at = state.first_failed_at = state.former_ended_at = -math.inf
    state.failure_reported_at = now + state.forgiven
    state.disconnected = set(state.holders)
    term = max(state.settings.time_to_live, least)
    for node in state.holders.values():
        node.seen_at = node.connected_at = -math.inf
        node.broken_at = now + state.forgiven
        node.lease_deadline = now + term
        node.spared_until = now + least
        enqueue(state, node)


def end_lingering(state: RunState, now: float) -> None:
    """Remove the nodes of a closed run whose leases are over; call `prune` before."""
    while state.lease_queue and max(state.lease_queue[0][0], spared_until(state)) <= now:
        _, node_id, _ = heapq.heappop(state.lease_queue)
        leave_closed(state, node_id)
        prune(state, now)


def leave_closed(state: RunState, node_id: str) -> None:
    """Remove a node of a closed run: no worker is alive on it, or it counts as gone."""
    state.lingering.pop(node_id, None)
    state.disconnected.discard(node_id)


def spared_until(state: RunState) -> float:
    """The time before which no lease ends, even past its deadline: a while after a pause that broke streams.

    As after a restart, nodes come back at their own pace. That their streams ended is noticed only now, and proves
    nothing. While some come back, others may still wait for admission: the service is busy with a herd of them.
    """
    longest = state.woke_at + _LONGEST_SPARED
    return min(max(state.woke_at + LEAST_TERM_AFTER_RESTART, state.returned_at + _ALL_BACK), longest)


def apply(state: RunState, fact: facts.Fact, now: float, when: float | None = None) -> RunState:
    """Fold one fact into a run's state.

    The state is handed over: the returned state replaces the argument, which must not be used again (it is changed in
    place, since copying it would make the joining of n nodes cost n²). It decides nothing: it accepts any fact that
    `decide` or `next_consequence` made, in their order.

    Deadlines are no part of a fact. They start at `now`, so a replay restarts them: a server that was away must not
    count the time in which it could not see the nodes.

    Args:
        now: Seconds of the server's monotonic clock.
        when: When it happened, by the same clock, if not now: a replay must not count restarts of long ago as recent.
    """
    state.revision += 1
    restarted = state.restart_count
    _apply(fact, state, now)
    if isinstance(fact, facts.RoundEnded) and state.restart_count > restarted:
        failures.note(state, fact.end.round, fact.end.node_id, now if when is None else min(when, now))
    failures.forget_old(state, now)
    _keep_scale_up(state, now)
    _keep_idle_since(state, now)
    return state


def resume_deadlines(state: RunState, now: float) -> None:
    """Restart every deadline that applies in the present state of a run."""
    _keep_last_call(state, now)
    _keep_scale_up(state, now)
    _keep_idle_since(state, now)
    _keep_hold(state, now)
    if state.phase is Phase.FROZEN:
        state.confirm_deadline = now + state.settings.confirm_timeout
    if state.phase is Phase.FINAL and state.finishing and not state.exit_barrier_passed:
        state.exit_barrier_deadline = now + state.settings.exit_barrier_timeout
    if state.breach is not None and state.breach.cause is RoundEndCause.WORKER_FAILED:
        state.settle_deadline = now + failures.SETTLE_WINDOW
        failures.await_signs_of_life(state)
    for node_id in state.failed_scale_ups_of:
        newcomers.hold_back(state, node_id, now)


@singledispatch
def _apply(fact: object, state: RunState, now: float) -> None:
    raise TypeError(f"not a fact: {fact!r}")


@_apply.register
def _run_created(fact: facts.RunCreated, state: RunState, now: float) -> None:
    if state.phase is Phase.CLOSED:
        again = reopened(state, state.revision - 1)
        for each in fields(RunState):
            setattr(state, each.name, getattr(again, each.name))
    state.created = True
    state.incarnation = fact.incarnation
    state.settings = fact.settings


_MOST_ENDED = 16
"""Earlier incarnations that a run remembers, so that their nodes learn how they ended. The lease of an older one is
refused as one that is lost; its agent has stopped its workers if it then joins as a newcomer."""


def reopened(state: RunState, last: int) -> RunState:
    """Return the state in which a closed run begins again after revision `last`: a new run whose numbers continue.

    Evictions by an operator stay, since their reason has not gone. Those by the service end with the budgets that they
    enforced.
    """
    assert state.run_end is not None, "a closed run has an end"
    ended = EndedIncarnation(state.incarnation, last, replace(state.run_end, failure=None))
    return RunState(
        state.run_id,
        revision=state.revision,
        round=state.round,
        evicted={node_id: each for node_id, each in state.evicted.items() if not each.by_service},
        ended_incarnations=(*state.ended_incarnations, ended)[-_MOST_ENDED:],
        forgiven=state.forgiven,
        woke_at=state.woke_at,
    )


@_apply.register
def _node_joined(fact: facts.NodeJoined, state: RunState, now: float) -> None:
    node = state.nodes[fact.node_id] = Node(
        node_id=fact.node_id,
        lease=fact.lease,
        address=fact.address,
        local_world_size=fact.local_world_size,
        role=fact.role,
        topology=fact.topology,
        lease_deadline=now + state.settings.time_to_live,
        waiting_since=now,
        token=fact.token,
        identity=fact.identity,
        supervisor_address=fact.supervisor_address,
        seen_at=now + state.forgiven,
        connected_at=now,
    )
    enqueue(state, node)
    _keep_last_call(state, now)


@_apply.register
def _node_lost(fact: facts.NodeLost, state: RunState, now: float) -> None:
    detail = explain_loss(fact.node_id, fact.reason, state.settings)
    if fact.failed_round:
        _attribute_failure(state, RoundEnd(fact.failed_round, RoundEndCause.NODE_LOST, fact.node_id, detail))
    _remove_node(state, fact.node_id, RoundEndCause.NODE_LOST, detail, now)


def _attribute_failure(state: RunState, end: RoundEnd) -> None:
    """Attribute the failure of a round to the loss of a node: it counts as no restart, and not against any node."""
    if state.phase is Phase.FINAL:
        state.breach, state.settle_deadline, state.silent = end, None, set()
    else:
        failures.forgive(state, end.round)
        state.counted_round, state.hold_until = 0, None
        if state.last_round_end is not None and state.last_round_end.round == end.round:
            state.last_round_end = end
    state.failure, state.failed_workers = None, set()


@_apply.register
def _node_left(fact: facts.NodeLeft, state: RunState, now: float) -> None:
    _remove_node(state, fact.node_id, RoundEndCause.NODE_LEFT, _left(fact), now)


@_apply.register
def _node_departing(fact: facts.NodeDeparting, state: RunState, now: float) -> None:
    state.departing[fact.node_id] = now + state.settings.confirm_timeout
    _vacate_seat(state, fact.node_id, RoundEndCause.NODE_LEFT, _left(fact))
    _keep_last_call(state, now)


@_apply.register
def _node_evicted(fact: facts.NodeEvicted, state: RunState, now: float) -> None:
    state.evicted[fact.node_id] = Eviction(fact.reason, fact.by_service)
    detail = explain_eviction(fact.node_id, fact.reason, by_service=fact.by_service)
    if fact.by_service:
        # The eviction replaces the failure as the cause, and removes its source: no restart is used up.
        state.breach = RoundEnd(state.round, RoundEndCause.NODE_EVICTED, fact.node_id, detail)
    if fact.node_id in state.nodes:
        _remove_node(state, fact.node_id, RoundEndCause.NODE_EVICTED, detail, now)


@_apply.register
def _node_readmitted(fact: facts.NodeReadmitted, state: RunState, now: float) -> None:
    del state.evicted[fact.node_id]
    failures.absolve(state, fact.node_id)


def _left(fact: facts.NodeLeft | facts.NodeDeparting) -> str:
    return f"node {fact.node_id} left: {fact.reason}"


def _remove_node(state: RunState, node_id: str, cause: RoundEndCause, detail: str, now: float) -> None:
    del state.nodes[node_id]
    state.departing.pop(node_id, None)
    state.disconnected.discard(node_id)
    _vacate_seat(state, node_id, cause, detail)
    _keep_last_call(state, now)


def _vacate_seat(state: RunState, node_id: str, cause: RoundEndCause, detail: str) -> None:
    state.unconfirmed.discard(node_id)
    state.silent.discard(node_id)
    if node_id in state.succeeded:
        # Its part is done: the round goes on without it, and its seat must not go to a new node of its name.
        state.succeeded.discard(node_id)
        del state.seats[node_id]
    elif node_id in state.seats and state.breach is None:
        state.breach = RoundEnd(state.round, cause, node_id, detail)
    elif node_id in state.seats and state.settling and node_id not in state.departing:
        # The end may wait for others: until then, its seat must not go to a node that joins under its name.
        del state.seats[node_id]


@_apply.register
def _round_frozen(fact: facts.RoundFrozen, state: RunState, now: float) -> None:
    state.phase = Phase.FROZEN
    state.round = fact.round
    state.newcomers = newcomers.of_round(state, fact.seats)
    state.seats = {seat.node_id: seat for seat in fact.seats}
    state.group_world_size = len(fact.seats)
    state.world_size = sum(seat.local_world_size for seat in fact.seats)
    state.master_address = state.nodes[fact.seats[0].node_id].address
    state.fencing_token = state.revision
    state.unconfirmed = set(state.seats)
    state.master_port = 0
    state.last_call_deadline = state.hold_until = None
    state.confirm_deadline = now + state.settings.confirm_timeout


@_apply.register
def _node_confirmed(fact: facts.NodeConfirmed, state: RunState, now: float) -> None:
    state.unconfirmed.discard(fact.node_id)
    if state.seats[fact.node_id].group_rank == 0:
        state.master_port = fact.master_port


@_apply.register
def _round_finalized(fact: facts.RoundFinalized, state: RunState, now: float) -> None:
    state.phase = Phase.FINAL
    state.confirm_deadline = None
    state.final_at = now + state.forgiven
    state.failure = state.permanent_failure = None
    state.failed_workers = set()
    state.counted_round = 0
    state.first_failed_at = -math.inf


@_apply.register
def _round_started(fact: facts.RoundStarted, state: RunState, now: float) -> None:
    starts.forget(state, recorded=True)


@_apply.register
def _worker_failed(fact: facts.WorkerFailed, state: RunState, now: float) -> None:
    failure = fact.failure
    state.failed_workers.add(failures.failed_worker(state, failure.node_id, failure))
    state.silent.discard(failure.node_id)
    if failure.permanent and state.permanent_failure is None:
        state.permanent_failure = failure
    first = state.failure is None or fact.earliest
    if first:
        state.first_failed_at = failures.failed_at(state, failure, now)
        state.failure = failure
    if state.phase is not Phase.FINAL:
        if first:
            _correct_round_end(state, failure)
    elif state.breach is None:
        state.breach = _end_by(failure)
        state.settle_deadline = now + failures.SETTLE_WINDOW
        state.failure_reported_at = now + state.forgiven
        failures.await_signs_of_life(state)
    elif first and state.breach.cause is RoundEndCause.WORKER_FAILED:
        state.breach = _end_by(failure)


def _end_by(failure: ReportedFailure) -> RoundEnd:
    return RoundEnd(failure.round, RoundEndCause.WORKER_FAILED, failure.node_id, explain_failure(failure))


def _correct_round_end(state: RunState, failure: ReportedFailure) -> None:
    """Attribute an already announced round end to an earlier failure that has since been reported."""
    failures.blame(state, failure.round, failure.node_id)
    if state.last_round_end is not None and state.last_round_end.round == failure.round:
        state.last_round_end = _end_by(failure)


@_apply.register
def _node_succeeded(fact: facts.NodeSucceeded, state: RunState, now: float) -> None:
    state.succeeded.add(fact.node_id)
    state.silent.discard(fact.node_id)
    state.finishing = True
    if state.exit_barrier_deadline is None and not state.exit_barrier_passed:
        state.exit_barrier_deadline = now + state.settings.exit_barrier_timeout


@_apply.register
def _exit_barrier_passed(fact: facts.ExitBarrierPassed, state: RunState, now: float) -> None:
    state.exit_barrier_passed = True
    state.exit_barrier_deadline = None


@_apply.register
def _restart_requested(fact: facts.RestartRequested, state: RunState, now: float) -> None:
    newcomers.forget_failures(state)  # and the back-off below: the operator may have removed the cause
    if state.phase is Phase.JOINABLE:
        state.quick_restarts, state.hold_until = 0, None
    elif state.breach is None:
        detail = f"an operator requested a restart: {fact.reason}"
        state.breach = RoundEnd(state.round, RoundEndCause.RESTART_REQUESTED, "", detail)


@_apply.register
def _round_ended(fact: facts.RoundEnded, state: RunState, now: float) -> None:
    _keep_former(fact, state, now)
    state.phase = Phase.JOINABLE
    if fact.restart_count > state.restart_count:
        state.counted_round = fact.end.round
    state.restart_count = fact.restart_count
    state.quick_restarts = fact.quick_restarts
    state.last_round_end = fact.end
    state.confirm_deadline = None
    for node in state.nodes.values():
        node.waiting_since = now
    _clear_round(state)
    _keep_last_call(state, now)
    _keep_hold(state, now)


def _keep_former(fact: facts.RoundEnded, state: RunState, now: float) -> None:
    """Keep from the round that ends the data that the next one needs: ranks, size, fencing token."""
    proven = len(state.seats.keys() - state.newcomers)
    failed = newcomers.note_end(state, fact.end, fact.failed_scale_ups, fact.newcomers_passed, now)
    size = (failed and proven) or len(state.seats)
    ran = state.phase is Phase.FINAL
    if ran:
        state.former_ended_at = now + state.forgiven
    # A round that never ran adds no node to those waited for; a last call has already waited for missing ones.
    state.former_size = size if ran else min(state.former_size, size)
    if ran or state.former_size == 0:
        state.former_ranks = {seat.node_id: seat.group_rank for seat in state.seats.values()}
        state.former_fencing_token = state.fencing_token


@_apply.register
def _run_closed(fact: facts.RunClosed, state: RunState, now: float) -> None:
    state.phase = Phase.CLOSED
    state.run_end = fact.end
    state.confirm_deadline = state.last_call_deadline = state.hold_until = None
    # No node has rights in a run that is over. Their workers may be alive: until they are gone, or the leases are over,
    # the run is not reopened.
    state.lingering, state.nodes = state.nodes, {}
    state.departing = {}
    _clear_round(state)


def _clear_round(state: RunState) -> None:
    state.seats = {}
    state.group_world_size = state.world_size = 0
    state.unconfirmed = set()
    state.succeeded = set()
    state.finishing = state.exit_barrier_passed = False
    state.exit_barrier_deadline = state.settle_deadline = None
    state.breach = None
    state.silent = set()
    starts.forget(state, recorded=False)


def _keep_last_call(state: RunState, now: float) -> None:
    """Start the last call when min_nodes are there, and end it when they no longer are."""
    if state.phase is not Phase.JOINABLE or state.present < state.settings.min_nodes:
        state.last_call_deadline = None
    elif state.last_call_deadline is None:
        state.last_call_deadline = now + state.settings.last_call_timeout


def _keep_hold(state: RunState, now: float) -> None:
    seconds = failures.held_back(state)
    state.hold_until = now + seconds if seconds > 0 else None


def _keep_idle_since(state: RunState, now: float) -> None:
    if state.nodes:
        state.idle_since = None
    elif state.idle_since is None:
        state.idle_since = now


def _keep_scale_up(state: RunState, now: float) -> None:
    """Start the scale-up delay with the first newcomer, and end it when the round has no room for any."""
    delays = state.settings.scale_up_policy is ScaleUpPolicy.DELAYED and state.phase is Phase.FINAL
    if not delays or not state.has_room:
        state.scale_up_deadline = None
    elif state.scale_up_deadline is None:
        state.scale_up_deadline = now + state.settings.scale_up_delay
