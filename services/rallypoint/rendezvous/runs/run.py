"""A run as this process hosts it: its state, and the readers of its updates."""

from __future__ import annotations

import asyncio
import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from rallypoint.rendezvous.base.codec import MessageCodec
from rallypoint.rendezvous.base.cooperative import LatestValue
from rallypoint.rendezvous.base.errors import StreamReplaced
from rallypoint.rendezvous.core import facts, failures
from rallypoint.rendezvous.core.commands import Actor, JoinTimedOut, LeaseLost, NodeIsEvicted, Refused
from rallypoint.rendezvous.core.decide import next_deadline
from rallypoint.rendezvous.core.facts import explain_loss
from rallypoint.rendezvous.core.state import (
    LossReason,
    Node,
    Phase,
    RecoveryParts,
    ReportedFailure,
    RoundEnd,
    RunEnd,
    RunSettings,
    RunState,
    Seat,
)
from rallypoint.rendezvous.runs.history import History
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.clock import ROUNDING, LagSettings, WatchClock
from rallypoint.rpc.durations import set_seconds, to_duration

# ---- First responses to newcomers, delayed while more of them are coming.
#
# A node that waits for a round needs its lease soon, not at once; it waits for its assignment anyway. In a storm of
# newcomers every message written is time in which no other node is admitted. So while they keep coming, the lease of
# each waits, and often goes out in one message with its assignment.


# Newcomers that come this close together are one storm, seconds. A lone one waits no longer than this for its lease.
_QUIET = 0.02
# The longest delay of a lease, as a share of its time to live. With the lease the node learns its heartbeat interval,
# and needs time to keep it: its first heartbeat comes after another third, or half at most.
_SHARE_OF_TERM = 1 / 3
# The longest delay in any case, seconds: a client gives up a connection that does not respond for a while.
_LONGEST_DELAY = 5.0


class PendingJoins:
    """Newcomers of one run that have got no response yet. Belongs to an event loop."""

    def __init__(self) -> None:
        # (latest time to wake, callback), in the order of their coming: in one run all wait equally long.
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, wake: Callable[[], None], time_to_live: float) -> None:
        """Have `wake` called when no more come, and before a third of the lease's time to live (seconds) is over."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        self._waiting.append((self._last + min(_LONGEST_DELAY, time_to_live * _SHARE_OF_TERM), wake))
        if self._timer is None:
            self._decide_again(loop)

    def _decide_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_at(min(self._last + _QUIET, self._waiting[0][0]), self._decide, loop)

    def _decide(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        quiet = now >= self._last + _QUIET
        while self._waiting and (quiet or now >= self._waiting[0][0]):
            self._waiting.popleft()[1]()
        if self._waiting:
            self._decide_again(loop)
        else:
            self._timer = None


# ---- Messages about a run: to its nodes, and to people and tools.


api_messages = MessageCodec(
    {
        RunSettings: pb.RunSettings,
        ReportedFailure: pb.WorkerFailure,
        RecoveryParts: pb.RecoveryParts,
        RoundEnd: pb.RoundEnd,
        RunEnd: pb.RunEnd,
        Actor: pb.Actor,
    }
)
"""The values that the API has as the core does; the journal has messages of its own for them."""

# A node takes some 100 bytes, and with the longest names 1,400; a client accepts messages of 4 MiB. Adding one takes
# 10 us, so that a run of any size delays the others by 20 ms at a time.
NODES_PER_MESSAGE = 2_000
# With usual names they take 200 KB. With the longest, and a sentence about the watchdog of each, they would not fit the
# 4 MiB that gRPC's clients take; the rest of a run needs up to 1 MiB of them.
_NODES_BYTES = 3 * 1024 * 1024
_FRAME_BYTES = 8


def node_update(state: RunState, node_id: str) -> pb.NodeUpdate:
    """Return the state of a run, as far as one of its nodes needs it. Costs the same for any number of nodes."""
    update = pb.NodeUpdate(
        revision=state.revision, phase=pb.Phase.ValueType(state.phase), restart_count=state.restart_count
    )
    seat = state.seats.get(node_id)
    if seat is not None:
        _fill_assignment(update.assignment, state, seat)
    if state.exit_barrier_passed:
        update.exit_barrier_passed = True
    if state.settling:
        update.settling = True
    if state.start_recorded:
        update.start_recorded = True
    _fill_ends(update, state)
    _fill_hold(update, state)
    return update


def lease_message(state: RunState, number: int, token: bytes = b"") -> pb.Lease:
    """Return a lease and its terms."""
    return pb.Lease(
        token=token,
        number=number,
        incarnation=state.incarnation,
        revision=state.revision,
        time_to_live=_duration(state.settings.time_to_live),
        keep_alive_interval=_duration(_heartbeat_interval(state.settings)),
    )


def _heartbeat_interval(settings: RunSettings) -> float:
    """Seconds; half the time to live if one missed heartbeat would end the lease, or it would flap."""
    return min(settings.keep_alive_interval, settings.time_to_live / 2)


# Shared durations must not be changed: all leases of a run have the same two.
_duration = functools.lru_cache(maxsize=256)(to_duration)


@dataclass(slots=True)
class StoppedRun(RunState):
    """Stands for the state of a run that an unexpected error has stopped: its name alone is set.

    Attributes:
        broken: The kind of the error.
    """

    broken: str = ""


def run_summary(state: RunState) -> pb.Run:
    """Return a run without its nodes."""
    if isinstance(state, StoppedRun):
        return pb.Run(run_id=state.run_id, broken=state.broken)
    run = pb.Run(
        run_id=state.run_id,
        revision=state.revision,
        phase=pb.Phase.ValueType(state.phase),
        round=state.round,
        world_size=state.world_size,
        restart_count=state.restart_count,
        node_count=len(state.nodes),
        succeeded_count=len(state.succeeded),
        exit_barrier_passed=state.exit_barrier_passed,
        counted_restarts=failures.counted(state),
        incarnation=state.incarnation,
    )
    run.settings.MergeFrom(api_messages.to_message(state.settings))
    _fill_ends(run, state)
    _fill_hold(run, state)
    return run


def run_message(state: RunState, most_nodes: int | None = None, now: float | None = None) -> pb.Run:
    """Return a run with its first nodes, see `nodes_in_order`.

    Args:
        most_nodes: None: all of them.
        now: Present time by the clock of its deadlines, seconds; None: these belong to another process.
    """
    run = run_summary(state)
    if now is not None and (join_deadline := state.join_deadline) is not None:
        set_seconds(run.join_time_left, max(0.0, join_deadline - now))
    elif now is not None and state.last_call_deadline is not None:
        set_seconds(run.last_call_left, max(0.0, state.last_call_deadline - now))
    run.nodes.extend(node_messages(state, islice(nodes_in_order(state), most_nodes)))
    run.evicted_node_ids.extend(sorted(state.evicted))
    return run


def nodes_in_order(state: RunState) -> Iterator[Node]:
    """Return the nodes of a run: participants by group rank, then the wait list."""
    seated = (state.nodes[node_id] for node_id in state.seats if node_id in state.nodes)
    unseated = (node for node in state.nodes.values() if node.node_id not in state.seats)
    return chain(seated, unseated)


def node_messages(state: RunState, nodes: Iterable[Node]) -> Iterator[pb.Node]:
    """Return the messages of some nodes of a run: the first ones that fit one message, and at least one."""
    room = _NODES_BYTES
    caused = Counter(each.node_id for each in state.restarts if state.settings.max_restarts_per_node)
    for node in nodes:
        message = pb.Node(
            node_id=node.node_id,
            address=node.address,
            role=node.role,
            local_world_size=node.local_world_size,
            state=node_state(state, node.node_id),
            connected=node.connected,
            topology=node.topology,
            lease=node.lease,
            counted_restarts=caused[node.node_id],
            watchdog_trouble=node.watchdog_trouble,
            supervisor_address=node.supervisor_address,
        )
        seat = state.seats.get(node.node_id)
        if seat is not None:
            _fill_assignment(message.assignment, state, seat)
        size = message.ByteSize() + _FRAME_BYTES
        if size > room and room < _NODES_BYTES:
            return
        room -= size
        yield message


def _fill_assignment(assignment: pb.Assignment, state: RunState, seat: Seat) -> None:
    assignment.round = state.round
    assignment.group_rank = seat.group_rank
    assignment.group_world_size = state.group_world_size
    assignment.base_rank = seat.base_rank
    assignment.world_size = state.world_size
    assignment.base_role_rank = seat.base_role_rank
    assignment.role_world_size = seat.role_world_size
    assignment.master_address = state.master_address
    assignment.master_port = state.master_port
    assignment.fencing_token = state.fencing_token


def _fill_ends(message: pb.NodeUpdate | pb.Run, state: RunState) -> None:
    if state.last_round_end is not None:
        message.last_round_end.MergeFrom(api_messages.to_message(state.last_round_end))
    if state.run_end is not None:
        message.run_end.MergeFrom(api_messages.to_message(state.run_end))


def _fill_hold(message: pb.NodeUpdate | pb.Run, state: RunState) -> None:
    if seconds := failures.held_back(state):
        set_seconds(message.held_back, seconds)


def node_state(state: RunState, node_id: str) -> pb.NodeState.ValueType:
    """Return the state of a node of a run."""
    if node_id in state.departing:
        return pb.NODE_STATE_DEPARTING
    if node_id not in state.seats:
        full = len(state.seats) >= state.settings.max_nodes
        return pb.NODE_STATE_SPARE if full else pb.NODE_STATE_WAITING
    if node_id in state.succeeded:
        return pb.NODE_STATE_SUCCEEDED
    if state.phase is Phase.FINAL:
        return pb.NODE_STATE_RUNNING
    return pb.NODE_STATE_ASSIGNED if node_id in state.unconfirmed else pb.NODE_STATE_CONFIRMED


# A checkpoint is written after this many records at least, and after this many per node: it costs as much as its nodes,
# and a recovery replays at most these.
_RECORDS_PER_CHECKPOINT = 1_000
_RECORDS_PER_NODE = 4


# ---- Watchers of a run.


# Seconds that it takes to build the message, per node, and to send it, per watcher.
_BUILD = 5e-6
_SEND = 100e-6
# A state that costs more than this is published for at most a tenth of the time; a cheaper one at each change.
_CHEAP = 2e-3
_SHARE = 0.1


class PublishedRun:
    """A state of a run, encoded once for all its watchers."""

    __slots__ = ("_response", "run")

    def __init__(self, run: pb.Run) -> None:
        self.run = run
        self._response: bytes | None = None

    @property
    def response(self) -> bytes:
        """The WatchRunResponse, encoded."""
        if self._response is None:
            self._response = pb.WatchRunResponse(run=self.run).SerializeToString()
        return self._response


class RunWatchers:
    """The watchers of a run. Each gets the state that was published last, and then those that follow.

    A large run, and one with many watchers, is published at intervals only.
    """

    __slots__ = ("_again_at", "_published", "slots")

    def __init__(self) -> None:
        """Begin without a watcher."""
        self.slots: set[LatestValue[PublishedRun]] = set()
        self._published: PublishedRun | None = None
        self._again_at = -math.inf

    def __len__(self) -> int:
        return len(self.slots)

    def deadline(self, state: RunState) -> float:
        """Return the time at which a newer state may be published; infinity: there is none, or no watcher."""
        return self._again_at if self.slots and self._is_behind(state) else math.inf

    def add(self, watcher: LatestValue[PublishedRun], seen: int, state: RunState, now: float) -> None:
        """Add a watcher that has seen a revision; it gets the published state at once, if that is newer."""
        published = self._published
        if published is None or (published.run.revision < state.revision and now >= self._again_at):
            published = self._publish(state, now)
        if published.run.revision > seen:
            watcher.put(published)
        self.slots.add(watcher)

    def publish(self, state: RunState, now: float, *, is_last: bool) -> None:
        """Publish a changed state, unless it is too early; the last one is never too early, and ends the streams."""
        if self._is_behind(state) and (now >= self._again_at or is_last):
            if self.slots:
                self._publish(state, now)
            else:
                self._published = None  # it may be large
        if is_last:
            for watcher in self.slots:
                watcher.end()
            self.slots.clear()

    def _is_behind(self, state: RunState) -> bool:
        return self._published is None or self._published.run.revision < state.revision

    def _publish(self, state: RunState, now: float) -> PublishedRun:
        self._published = published = PublishedRun(run_message(state, NODES_PER_MESSAGE, now))
        for watcher in self.slots:
            watcher.put(published)
        cost = _BUILD * len(state.nodes) + _SEND * len(self.slots)
        self._again_at = now + cost / _SHARE if cost > _CHEAP else -math.inf
        return published


# ---- A run.


@dataclass(eq=False, slots=True)
class Member:
    """A node with an open stream; `updates` holds its next message.

    `stays`: its client keeps the stream after the end of the run, until no worker of the node is alive.
    """

    run_id: str
    node_id: str
    lease: pb.Lease
    updates: LatestValue[pb.NodeUpdate]
    stays: bool = False


@dataclass(slots=True)
class HostedRun:
    """A run, with its members, watchers and followers."""

    state: RunState
    history: History
    recorded: int = 0  # the last revision that was given to the journal
    checkpoint: int = 0  # the last revision that a checkpoint has
    writable_round: int | None = None  # see `RendezvousEngine.writable_round`
    ended: bool = False  # whether it is durable that the run is closed
    client: str = ""  # the one that created it; empty: unknown to this process
    deleted_by: str = ""  # the operator who deletes it; empty: none
    members: dict[str, Member] = field(default_factory=dict)
    # (node, lease) of resume requests under way, with the number of streams that request it.
    returning: Counter[tuple[str, int]] = field(default_factory=Counter)
    pending_joins: PendingJoins = field(default_factory=PendingJoins)
    watchers: RunWatchers = field(default_factory=RunWatchers)
    followers: set[LatestValue[int]] = field(default_factory=set)
    # Newcomers that wait until the closed run can be reopened.
    waiting: set[LatestValue[bool]] = field(default_factory=set)
    # The revision last published to followers.
    _followed: int = 0
    # True once members got an update that the round settles; sent once only, since failures may come by the thousand.
    _settling: bool = False

    def expires(self, time_to_live: float) -> float:
        """The time at which the run is forgotten; infinity while it has nodes."""
        if self.deleted_by:
            return -math.inf
        return math.inf if self.state.idle_since is None else self.state.idle_since + time_to_live

    def next_deadline(self, time_to_live: float) -> float | None:
        """The time at which to look at the run again if nothing happens to it; None: never."""
        deadline = min(
            next_deadline(self.state) or math.inf,
            self.expires(time_to_live),
            self.watchers.deadline(self.state),
        )
        return None if deadline == math.inf else deadline

    def wants_checkpoint(self) -> bool:
        """True if there are so many records since the last checkpoint that the next one is due."""
        most = max(_RECORDS_PER_CHECKPOINT, _RECORDS_PER_NODE * len(self.state.nodes))
        return self.recorded - self.checkpoint >= most

    def latest_round(self) -> int:
        """Return the only round whose workers may write, by the latest facts, durable or not."""
        last, latest = self.state.last_round_end, self.state.round
        over = last is not None and last.round == latest
        # A run created again after its expiry continues the round numbers of the expired one, whose last round is over.
        inherited = latest > 0 and self.state.fencing_token == 0
        return latest + 1 if over or inherited else latest

    def keep_writable_round(self) -> None:
        """Copy from the state, which is durable at this moment, which round may write, and that the run has ended."""
        self.writable_round = self.latest_round()
        self.ended = self.state.run_end is not None

    def enrol(self, node_id: str, number: int, *, stays: bool = False) -> Member:
        """Add a node's stream, replacing an older one of the same node; `stays`: see Member."""
        older = self.members.get(node_id)
        if older is not None:
            older.updates.end(StreamReplaced("the node opened a newer stream with the same lease"))
        lease = lease_message(self.state, number, self.state.holders[node_id].token)
        member = self.members[node_id] = Member(self.state.run_id, node_id, lease, LatestValue(), stays)
        self.pending_joins.add(member.updates.wake, self.state.settings.time_to_live)
        return member

    def closing_update(self, node_id: str, number: int) -> Member:
        """Return the only message for a node that comes back to a run which was closed while it was away."""
        member = Member(self.state.run_id, node_id, lease_message(self.state, number), LatestValue())
        member.updates.put(node_update(self.state, node_id))
        member.updates.end()
        return member

    def holds_lease(self, node_id: str, lease: int, token: bytes | None = None) -> bool:
        """True if a node's lease is valid (see `check_lease`), or was at the end of the run and the node lingers.

        The state may be ahead of the node's updates.
        """
        node = self.state.holders.get(node_id)
        return node is not None and node.lease == lease and (token is None or node.is_proven_by(token))

    def end_stale_member(self, fact: facts.NodeLost | facts.NodeLeft | facts.NodeEvicted) -> None:
        """End the stream of a node whose lease is gone: normally if it left, otherwise with the reason."""
        member = self.members.get(fact.node_id)
        if member is None or self.holds_lease(member.node_id, member.lease.number):
            return
        del self.members[fact.node_id]
        member.updates.end(None if isinstance(fact, facts.NodeLeft) else self._refusal(member, fact))

    def _refusal(self, member: Member, loss: facts.NodeLost | facts.NodeEvicted) -> Refused:
        run_id, settings = self.state.run_id, self.state.settings
        if isinstance(loss, facts.NodeEvicted):
            return NodeIsEvicted(run_id, loss.node_id, loss.reason, loss.by_service)
        if loss.reason is LossReason.JOIN_TIMED_OUT:
            return JoinTimedOut(run_id, loss.node_id, settings.min_nodes, settings.join_timeout)
        node = self.state.nodes.get(loss.node_id)
        detail = explain_loss(loss.node_id, loss.reason, settings)
        return LeaseLost(run_id, loss.node_id, member.lease.number, node.lease if node else None, detail)

    def begins_to_settle(self) -> bool:
        """True once each time the round begins to settle; call it after each change."""
        before, self._settling = self._settling, self.state.settling
        return self._settling and not before

    def publish_to_members(self) -> None:
        """Send every node the present state; once the run is closed, end the streams of those that do not stay."""
        for member in self.members.values():
            member.updates.put(node_update(self.state, member.node_id))
        if self.state.run_end is not None:
            self._end_streams(lambda member: not member.stays)

    def end_gone(self) -> None:
        """End the streams of nodes that have gone from a closed run; wake waiting joins if it can be reopened."""
        if self.state.phase is Phase.CLOSED:
            self.end_streams_of_gone()
        if self.waiting and not (self.state.phase is Phase.CLOSED and self.state.lingering):
            for each in self.waiting:
                each.put(True)
            self.waiting.clear()

    def end_streams_of_gone(self) -> None:
        """End the streams of nodes without a lease; for a run that is closed, or was reopened just now."""
        self._end_streams(lambda member: not self.holds_lease(member.node_id, member.lease.number))

    def _end_streams(self, of: Callable[[Member], bool]) -> None:
        for member in [each for each in self.members.values() if of(each)]:
            del self.members[member.node_id]
            member.updates.end()

    def publish_to_watchers(self, now: float) -> None:
        """Send watchers and followers the changes, and end their streams once the run is closed."""
        if self._followed < self.history.latest:
            self._followed = self.history.latest
            for follower in self.followers:
                follower.put(self._followed)
        self.watchers.publish(self.state, now, is_last=self.ended)
        if self.ended:
            for follower in self.followers:
                follower.end()
            self.followers.clear()

    def slots(self) -> Iterator[LatestValue[Any]]:
        """All values through which streams of this run are updated and ended."""
        yield from (member.updates for member in self.members.values())
        yield from self.watchers.slots
        yield from self.followers
        yield from self.waiting


# ---- The clock of leases and deadlines of runs.


class LeaseClock:
    """Seconds without the pauses of this process, stopped once it drains.

    While nodes can't send heartbeats, their leases must not run down.

    A timer of its own notices pauses, so that no other slow operation (a commit) is taken for one. Each reading
    notices them too: the timer need not be the first to run when the process wakes.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        lag: LagSettings,
        on_forgiven: Callable[[float, float], None] = lambda seconds, now: None,
    ) -> None:
        """Set up; `watch` starts the timer.

        Args:
            clock: Monotonic seconds.
            lag: How pauses are noticed and forgiven.
            on_forgiven: Called with the seconds that were just left out, and the present time of this clock.
        """
        self._clock = clock
        self._lag = lag
        self._on_forgiven = on_forgiven
        self._shown = WatchClock(clock(), lag)
        self._timer: asyncio.TimerHandle | None = None
        # The time at which the timer should fire, if there is one.
        self._due = 0.0
        self._stopped_at: float | None = None

    def now(self) -> float:
        """Return the time, seconds."""
        if self._stopped_at is not None:
            return self._stopped_at
        self._check()
        return self._shown.read(self._clock())

    def stop(self) -> None:
        """Stop the clock at its present time."""
        self._stopped_at = self.now()
        self.watch(wanted=False)

    def timeout(self, deadline: float | None) -> float | None:
        """Seconds until a deadline; None: for ever. It may prove to be too early, if there is a pause."""
        if deadline is None or self._stopped_at is not None:
            return None
        return max(ROUNDING, deadline - self.now())

    def watch(self, *, wanted: bool) -> None:
        """Start or stop noticing pauses: without deadlines the timer need not wake the process."""
        if not wanted:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None and self._stopped_at is None:
            self._due = self._clock() + self._lag.pulse
            self._set_timer()

    def leave_out(self, since: float) -> None:
        """Leave out the time since the underlying clock showed `since`, if it is long enough for a pause."""
        self._forgive(since + self._lag.pulse)

    def _set_timer(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._lag.pulse, self._pulse)

    def _pulse(self) -> None:
        self._check()
        self._set_timer()

    def _check(self) -> None:
        if self._timer is not None:
            due, self._due = self._due, self._clock() + self._lag.pulse
            self._forgive(due)

    def _forgive(self, due: float) -> None:
        now = self._clock()
        if (seconds := self._shown.observe(now, due)) > 0:
            self._on_forgiven(seconds, self._shown.read(now))
