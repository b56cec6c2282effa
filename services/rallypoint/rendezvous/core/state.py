"""The state of a run, its settings, and the values in them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from hmac import compare_digest

# The enums have the protocol's numbers: stored and sent values need no translation table.


class Phase(IntEnum):
    """Phase of a run; the names are those of torch's etcd rendezvous."""

    JOINABLE = 1
    FROZEN = 2
    FINAL = 3
    CLOSED = 4


class Outcome(IntEnum):
    """How a run ended."""

    SUCCEEDED = 1
    FAILED = 2
    CANCELLED = 3


class ScaleUpPolicy(IntEnum):
    """The effect of a newcomer on a running round that has room."""

    IMMEDIATE = 1
    ON_RESTART = 2
    DELAYED = 3


class RankPolicy(IntEnum):
    """The order in which the nodes of a round get their ranks."""

    STABLE = 1
    SORTED = 2
    TOPOLOGY = 3


class Reopen(IntEnum):
    """Which closed runs a join opens again."""

    NEVER = 1
    FAILED = 2
    ALWAYS = 3


class RoundEndCause(IntEnum):
    """The reason why a round ended."""

    NODE_LOST = 1
    NODE_LEFT = 2
    WORKER_FAILED = 3
    NODE_JOINED = 4
    RESTART_REQUESTED = 5
    NODE_EVICTED = 6


class FailureKind(IntEnum):
    """The kind of a worker's failure; agents write the names, in lower case, into their failure files and events."""

    UNKNOWN = 0
    EXCEPTION = 1
    EXIT_CODE = 2
    SIGNAL = 3
    OUT_OF_MEMORY = 4
    HUNG = 5
    NOT_STARTED = 6
    PORT_TAKEN = 7


class LossReason(IntEnum):
    """The reason why the server considers a node lost."""

    LEASE_EXPIRED = 1
    DISCONNECTED = 2
    SUPERSEDED = 3
    CONFIRM_TIMED_OUT = 4
    JOIN_TIMED_OUT = 5
    DEPARTURE_TIMED_OUT = 6


# ---- Bounds that no sensible run comes near. The first two keep every rank within 32 bits. A time no longer than
# LONGEST (in nanoseconds below 2**51) goes through a float and back without losing one of them, so a node's settings
# are the same on the wire, in the core and in a journal.

MOST_NODES = 100_000
MOST_WORKERS_PER_NODE = 16_384
MOST_RESTARTS = 1_000_000
MOST_RESTARTS_KEPT = 10_000
"""Bound of `max_restarts` where restarts are kept one by one, with time and node: some 50 bytes each in a snapshot."""
LONGEST = 25 * 24 * 3600.0
"""The longest time of a run, in seconds."""
LONGEST_LEASE = 3600.0
"""Seconds that a lease may live without a sign of life. A node that vanished holds up its run for as long."""


def _number(default: int, least: int, most: int) -> int:
    number: int = field(default=default, metadata={"least": least, "most": most})
    return number


def _seconds(default: float, *, zero: bool = False) -> float:
    """Define a time of at most LONGEST; `zero`: it may be 0."""
    seconds: float = field(default=default, metadata={"zero": zero})
    return seconds


@dataclass(frozen=True, slots=True)
class RunSettings:
    """The settings that all nodes of a run share. Times are in seconds.

    The defaults are those of torch's dynamic rendezvous where it has the setting. Each field has its range: the
    service checks requests against it, and an agent checks `--rdzv-conf`.
    """

    # Nodes of a round. Raising min_nodes above the number that is surely there makes every loss wait for a replacement.
    min_nodes: int = _number(1, 1, MOST_NODES)
    max_nodes: int = _number(1, 1, MOST_NODES)
    # Restarts of failing workers, over the whole run; changes of membership don't count.
    max_restarts: int = _number(0, 0, MOST_RESTARTS)
    # How long a node waits for min_nodes. Long, since queues hand out hosts minutes apart.
    join_timeout: float = _seconds(600.0)
    # How long a round that could start waits for more. Every second of it is idle time of the nodes already there; too
    # short, and a newcomer a second late costs all nodes a restart.
    last_call_timeout: float = _seconds(30.0, zero=True)
    # How long a participant may take to stop its old workers. It must exceed the agents' shutdown timeout
    # (30 s), or a slow stop is taken for a dead agent.
    confirm_timeout: float = _seconds(60.0)
    # A lease lives keep_alive_interval * keep_alive_max_attempt without a heartbeat: the time to notice a
    # host that vanished without closing its connections.
    keep_alive_interval: float = _seconds(5.0)
    keep_alive_max_attempt: int = _number(3, 1, 1000)
    # How long a node whose stream broke may stay away: the time to notice a killed agent. Less than a
    # reconnect takes, and every hiccup of the network ends a round.
    disconnect_grace: float = _seconds(2.0, zero=True)
    # How long participants that succeeded wait for the others; past it they may go. As long as torch's agents
    # wait. Shorter, and a failure late in the run finds fewer hosts to restart on; longer keeps idle hosts.
    exit_barrier_timeout: float = _seconds(300.0)
    scale_up_policy: ScaleUpPolicy = ScaleUpPolicy.IMMEDIATE
    # Under the policy DELAYED: how long a round waits for more newcomers before it ends for them. Longer saves restarts
    # when hosts come one by one, and leaves them idle meanwhile.
    scale_up_delay: float = _seconds(30.0, zero=True)
    rank_policy: RankPolicy = RankPolicy.STABLE
    # Restarts older than this no longer count against the budgets; 0: they count for ever, as with torch. Without it,
    # a job of months dies of as many failures as one of an hour may have.
    restart_window: float = _seconds(0.0, zero=True)
    # Restarts that the workers of one node may cause before the node is taken out; 0: any number, as with torch.
    max_restarts_per_node: int = _number(0, 0, MOST_RESTARTS)
    # The longest back-off before a restart when rounds fail in quick succession; 0: none. Longer reduces the load on
    # the cause of the failures (storage, a licence server) and keeps hosts idle.
    restart_backoff: float = _seconds(30.0, zero=True)
    # Which closed runs a later join opens again. A scheduler that requeues a job keeps its id, and with it the name of
    # the run. ALWAYS also repeats a job that has succeeded, for example if it is requeued by mistake.
    reopen: Reopen = Reopen.FAILED

    @property
    def time_to_live(self) -> float:
        """Seconds that a lease lives without a sign of life of its node."""
        return self.keep_alive_interval * self.keep_alive_max_attempt


@dataclass(frozen=True, slots=True)
class ReportedFailure:
    """A worker's failure as its agent reported it; see the protocol's message WorkerFailure."""

    round: int
    rank: int
    local_rank: int
    role: str
    node_id: str
    host: str
    pid: int
    exit_code: int
    time: float
    message: str
    traceback: str
    log_file: str
    # How old it was when it was reported, seconds.
    age: float = 0.0
    kind: FailureKind = FailureKind.UNKNOWN
    permanent: bool = False
    core_file: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryParts:
    """Seconds of each part of a recovery on one node, by its clock; see the protocol's message."""

    detected: float = 0.0
    told: float = 0.0
    stopped: float = 0.0
    reformed: float = 0.0
    started: float = 0.0

    @property
    def own(self) -> float:
        """Seconds in which the node did not wait for the run."""
        return self.detected + self.stopped + self.started


_PARTS = {"reformed": "re-formed"}


def explain_parts(parts: Mapping[str, float]) -> str:
    """Return the seconds of the parts of a recovery, by name, as one text."""
    return ", ".join(f"{_PARTS.get(part, part)} {seconds:.2f}" for part, seconds in parts.items())


@dataclass(frozen=True, slots=True)
class FailedWorker:
    """A worker with a known failure."""

    node_id: str
    local_rank: int


@dataclass(frozen=True, slots=True)
class FailureRestart:
    """A restart for a failure; `node_id` is that of the worker that failed first, "" once it was absolved."""

    round: int
    node_id: str
    # Volatile: the time of the restart, by the server's monotonic clock.
    at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Eviction:
    """The reason why a node was taken out, and whether the service did it by itself."""

    reason: str
    by_service: bool = False


@dataclass(frozen=True, slots=True)
class RoundEnd:
    """How a round ended; `detail` is one sentence for people."""

    round: int
    cause: RoundEndCause
    node_id: str
    detail: str


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended; `failure` is the one that ended it, if one did."""

    outcome: Outcome
    detail: str
    failure: ReportedFailure | None = None


@dataclass(frozen=True, slots=True)
class EndedIncarnation:
    """An incarnation of a run that was reopened since; `revision` is its last one, above all its leases."""

    incarnation: str
    revision: int
    end: RunEnd


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's rank assignment in a round."""

    node_id: str
    group_rank: int
    base_rank: int
    base_role_rank: int
    role_world_size: int
    local_world_size: int


@dataclass(slots=True)
class Node:
    """A node that holds a lease."""

    node_id: str
    lease: int
    address: str
    local_world_size: int
    role: str
    topology: str
    lease_deadline: float
    waiting_since: float
    # See commands.Join.
    token: bytes = field(default=b"", repr=False)
    identity: str = ""
    supervisor_address: str = ""
    # Deadline of its live entry in the lease queue; never later than that of the lease.
    queued_deadline: float = 0.0
    # Volatile, by the clock that forgives no pauses: the last sign of life, and when the stream broke (None: not yet).
    seen_at: float = -math.inf
    broken_at: float | None = None
    # Volatile: when the stream was opened, and the loss reason if the lease expires.
    connected_at: float = -math.inf
    # Before this its lease does not end: since the start of the service, no stream of the node has stood.
    spared_until: float = -math.inf
    loss_if_expired: LossReason = LossReason.LEASE_EXPIRED
    # Volatile: why no watchdog watches its workers, from its last heartbeat.
    watchdog_trouble: str = ""

    def is_proven_by(self, token: bytes) -> bool:
        """True if the token is that of its lease. A lease that an older version granted has none, and needs none."""
        return not self.token or compare_digest(token, self.token)

    @property
    def connected(self) -> bool:
        """True if a stream of the node is open."""
        return self.broken_at is None


@dataclass(slots=True)
class RunState:
    """A run. All of it is the fold of its facts, except fields marked as volatile.

    Volatile fields (lease deadlines, connections) are never stored: a server that starts again gives every lease a full
    new term, and restarts every deadline.
    """

    run_id: str
    # True once the run began. Before, it may have numbers already: those of an expired run of its name, which continue.
    created: bool = False
    # Unique for each creation and reopening of a run of this name. Lease numbers of two incarnations can be compared
    # only if the later one reopened the run.
    incarnation: str = ""
    # Earlier incarnations that were reopened, the oldest first; the latest few.
    ended_incarnations: tuple[EndedIncarnation, ...] = ()
    settings: RunSettings = RunSettings()
    revision: int = 0
    phase: Phase = Phase.JOINABLE
    round: int = 0
    restart_count: int = 0
    # The nodes that hold a lease, in the order of joining.
    nodes: dict[str, Node] = field(default_factory=dict)

    # In CLOSED: the nodes that held a lease at the end, until they have left or their leases are over: their workers
    # may be alive. They have no rights. That one has gone is no fact: after a recovery all are there, for one term.
    lingering: dict[str, Node] = field(default_factory=dict, compare=False)

    # Nodes that announced their leaving, in that order, with the time by which they must have gone. Their old
    # workers may be alive, so no round is formed before.
    departing: dict[str, float] = field(default_factory=dict)

    # Nodes that were taken out and are refused. A name that ends with * stands for all names with that beginning.
    evicted: dict[str, Eviction] = field(default_factory=dict)

    # The round that is FROZEN or FINAL; empty in the other phases.
    seats: dict[str, Seat] = field(default_factory=dict)
    group_world_size: int = 0
    world_size: int = 0
    master_address: str = ""
    fencing_token: int = 0
    unconfirmed: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    # True if any participant succeeded, also one that has gone since.
    finishing: bool = False
    # True if the participants that succeeded no longer wait for the others.
    exit_barrier_passed: bool = False
    master_port: int = 0

    # From the last round that was FINAL: ranks, so that survivors keep them, and size, so that a round that lost no
    # node, or had a spare for each that it lost, needs no last call. Newcomers that failed on probation do not count.
    former_ranks: Mapping[str, int] = field(default_factory=dict)
    former_size: int = 0
    former_fencing_token: int = 0
    last_round_end: RoundEnd | None = None
    run_end: RunEnd | None = None

    # The pending end of the round, found by apply and carried out by next_consequence.
    breach: RoundEnd | None = None

    # The first failure of the round, over all nodes, the first permanent one, and all workers with a known failure.
    # They stay until the next round is FINAL: some are reported only after their round has ended.
    failure: ReportedFailure | None = None
    permanent_failure: ReportedFailure | None = None
    failed_workers: set[FailedWorker] = field(default_factory=set)
    # The round that ended with a counted restart, until the next one is FINAL; 0: there is none. If the loss of a node
    # turns out to be the cause meanwhile, the restart no longer counts.
    counted_round: int = 0

    # Restarts that may count against a budget, the oldest first; empty if `restart_count` is enough.
    restarts: list[FailureRestart] = field(default_factory=list)
    # The number of latest restarts in a row that came soon after the one before.
    quick_restarts: int = 0

    # Newcomers on probation, the scale-ups that failed in a row, and those of single nodes, the oldest first.
    newcomers: set[str] = field(default_factory=set)
    failed_scale_ups: int = 0
    failed_scale_ups_of: dict[str, int] = field(default_factory=dict)
    newcomers_held_until: float = -math.inf
    held_until_of: dict[str, float] = field(default_factory=dict)
    # Volatile: leases of the newcomers that were in the round of the last failed scale-up, and not its cause.
    excused: set[int] = field(default_factory=set, compare=False)

    last_call_deadline: float | None = None
    confirm_deadline: float | None = None
    exit_barrier_deadline: float | None = None
    scale_up_deadline: float | None = None
    # The end of the settle window (None: no longer waiting for reports of others), and of the restart back-off.
    settle_deadline: float | None = None
    hold_until: float | None = None

    # True if the start of the FINAL round is recorded. Until then, volatile, from the reports of its participants: the
    # nodes that reported, the slowest with its parts, and when the last workers had started, by the clock that forgives
    # no pauses. By that clock too: when the former round that ran ended; -inf: unknown to this server.
    start_recorded: bool = False
    started: set[str] = field(default_factory=set, compare=False)
    slowest: tuple[str, RecoveryParts] | None = field(default=None, compare=False)
    last_start_at: float = field(default=-math.inf, compare=False)
    former_ended_at: float = field(default=-math.inf, compare=False)
    # Volatile: seconds by which the clock of leases and deadlines is behind one that forgives no pauses. The latter
    # measures the ages of failures.
    forgiven: float = field(default=0.0, compare=False)
    # Volatile, by the clock that forgives no pauses: when the round became FINAL, when its first failure was, and when
    # that was reported; -inf: unknown to this server.
    final_at: float = field(default=-math.inf, compare=False)
    first_failed_at: float = field(default=-math.inf, compare=False)
    failure_reported_at: float = field(default=-math.inf, compare=False)
    # Volatile: participants without a sign of life since then.
    silent: set[str] = field(default_factory=set, compare=False)
    # Volatile: nodes that hold a lease and have no open stream.
    disconnected: set[str] = field(default_factory=set, compare=False)
    # Volatile: since when no node holds a lease; None: some node does.
    idle_since: float | None = None
    # Volatile: when the server last woke from a pause that may have broken streams, and when a node last came back.
    woke_at: float = field(default=-math.inf, compare=False)
    returned_at: float = field(default=-math.inf, compare=False)
    # Volatile: (deadline, node_id, lease) of every lease, a heap. One entry per lease is live, and may be too early,
    # never too late; the others wait to be removed.
    lease_queue: list[tuple[float, str, int]] = field(default_factory=list)

    @property
    def holders(self) -> dict[str, Node]:
        """Nodes with a lease that runs: in CLOSED those that linger."""
        return self.lingering if self.phase is Phase.CLOSED else self.nodes

    def ended_before(self, lease: int) -> EndedIncarnation | None:
        """The earlier incarnation that granted a lease; None: the present one did, or one that is not remembered."""
        return next((each for each in self.ended_incarnations if lease <= each.revision), None)

    @property
    def waiting(self) -> list[Node]:
        """Nodes without a rank assignment, in the order of joining."""
        return [
            node
            for node in self.nodes.values()
            if node.node_id not in self.seats and node.node_id not in self.departing
        ]

    @property
    def present(self) -> int:
        """Number of nodes that can be in the next round."""
        return len(self.nodes) - len(self.departing)

    def evicted_as(self, node_id: str) -> str | None:
        """Return the evicted name for which a node that joins is refused; None: it is not."""
        if node_id in self.evicted:
            return node_id
        return next(
            (name for name in self.evicted if name.endswith("*") and node_id.startswith(name[:-1])), None
        )

    @property
    def eldest(self) -> Node | None:
        """The node that has waited longest for a round: the first, since a round end restarts the wait of all."""
        return next(iter(self.nodes.values()), None)

    @property
    def join_deadline(self) -> float | None:
        """The time at which the eldest node stops waiting for min_nodes; None: it does not wait for them."""
        if self.phase is not Phase.JOINABLE or self.eldest is None or self.present >= self.settings.min_nodes:
            return None
        return self.eldest.waiting_since + self.settings.join_timeout

    @property
    def held_up(self) -> bool:
        """True if a leaving node may still have workers of the round before; a leaving spare never had any."""
        return any(node_id in self.former_ranks for node_id in self.departing)

    @property
    def settling(self) -> bool:
        """True if the round has failed and is kept until its cause is known: a worker, or the loss of a node."""
        breach = self.breach
        return (
            self.phase is Phase.FINAL and breach is not None and breach.cause is RoundEndCause.WORKER_FAILED
        )

    @property
    def has_room(self) -> bool:
        """True if nodes wait for which the round has room."""
        return len(self.seats) < self.settings.max_nodes and self.present > len(self.seats)
