"""What the rendezvous service knows of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

# The numbers of the enums are those of the protocol: what is stored and sent is read back without a table.


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
    """What a newcomer does to a round that runs with room to spare."""

    IMMEDIATE = 1
    ON_RESTART = 2
    DELAYED = 3


class RankPolicy(IntEnum):
    """In which order the nodes of a round get their ranks."""

    STABLE = 1
    SORTED = 2
    TOPOLOGY = 3


class RoundEndCause(IntEnum):
    """Why a round ended."""

    NODE_LOST = 1
    NODE_LEFT = 2
    WORKER_FAILED = 3
    NODE_JOINED = 4
    RESTART_REQUESTED = 5
    NODE_EVICTED = 6


class FailureKind(IntEnum):
    """What kind of end a worker had."""

    UNKNOWN = 0
    EXCEPTION = 1
    EXIT_CODE = 2
    SIGNAL = 3
    OUT_OF_MEMORY = 4
    HUNG = 5
    NOT_STARTED = 6
    PORT_TAKEN = 7


class LossReason(IntEnum):
    """How the server came to hold a node for lost."""

    LEASE_EXPIRED = 1
    DISCONNECTED = 2
    SUPERSEDED = 3
    CONFIRM_TIMED_OUT = 4
    JOIN_TIMED_OUT = 5
    DEPARTURE_TIMED_OUT = 6


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What all nodes of a run agree on. Times are in seconds.

    The defaults are those of torch's dynamic rendezvous where it has the setting.
    """

    # Nodes of a round. Raising min_nodes above what is surely there makes every loss wait for a replacement.
    min_nodes: int = 1
    max_nodes: int = 1
    # Restarts of failing workers, over the whole run; changes of membership don't count.
    max_restarts: int = 0
    # How long a node waits for min_nodes. Long, since queues hand out hosts minutes apart.
    join_timeout: float = 600.0
    # How long a round that could start waits for more. Every second of it is idle time of the nodes already
    # there; too short, and a newcomer a second late costs everybody a restart.
    last_call_timeout: float = 30.0
    # How long a participant may take to stop its old workers. It must exceed the agents' shutdown timeout
    # (30 s), or a slow stop is taken for a dead agent.
    confirm_timeout: float = 60.0
    # A lease lives keep_alive_interval * keep_alive_max_attempt without a heartbeat: the time to notice a
    # host that vanished without closing its connections.
    keep_alive_interval: float = 5.0
    keep_alive_max_attempt: int = 3
    # How long a node whose stream broke may stay away: the time to notice a killed agent. Less than a
    # reconnect takes, and every hiccup of the network ends a round.
    disconnect_grace: float = 2.0
    # How long participants that succeeded wait for the others; past it they may go. As long as torch's agents
    # wait. Shorter, and a failure late in the run finds fewer hosts to restart on; longer keeps idle hosts.
    exit_barrier_timeout: float = 300.0
    scale_up_policy: ScaleUpPolicy = ScaleUpPolicy.IMMEDIATE
    # Under the policy DELAYED: how long newcomers are gathered. Longer saves restarts when hosts come one by
    # one, and leaves them idle meanwhile.
    scale_up_delay: float = 30.0
    rank_policy: RankPolicy = RankPolicy.STABLE
    # Restarts older than this no longer count against the budgets; 0: they count for ever, as with torch. Without it,
    # a job of months dies of as many failures as one of an hour may have.
    restart_window: float = 0.0
    # Restarts that the workers of one node may cause, before it is taken out; 0: any number, as with torch.
    max_restarts_per_node: int = 0
    # The longest that a restart is held back where rounds fail soon one after the other; 0: never. Longer is kinder to
    # what they fail of (storage, a licence server) and keeps hosts idle.
    restart_backoff: float = 30.0

    @property
    def time_to_live(self) -> float:
        """Seconds that a lease lives without evidence of its node."""
        return self.keep_alive_interval * self.keep_alive_max_attempt


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A worker's failure as its agent reported it; see the protocol's message of the same name."""

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
class FailedWorker:
    """A worker whose failure is known."""

    node_id: str
    local_rank: int


@dataclass(frozen=True, slots=True)
class FailureRestart:
    """A restart for a failure; `node_id` is that of the worker that failed first, "" once it was absolved."""

    round: int
    node_id: str
    # Evidence: when, by the server's monotonic clock.
    at: float = field(compare=False)


@dataclass(frozen=True, slots=True)
class Eviction:
    """Why a node was taken out, and whether the service did it by itself."""

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
    failure: WorkerFailure | None = None


@dataclass(frozen=True, slots=True)
class Seat:
    """A node's place in a round."""

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
    # Deadline of its live entry in the lease queue; never later than that of the lease.
    queued_deadline: float = 0.0
    # Evidence: the last sign of life, when the stream was opened and when it broke (None: it is open), and what an end
    # of the lease by itself would mean.
    seen_at: float = -math.inf
    connected_at: float = -math.inf
    broken_at: float | None = None
    loss_if_expired: LossReason = LossReason.LEASE_EXPIRED
    # Evidence: why no watchdog guards its workers, of its last heartbeat.
    watchdog_trouble: str = ""

    @property
    def connected(self) -> bool:
        """Whether a stream of the node is open."""
        return self.broken_at is None


@dataclass(slots=True)
class RunState:
    """A run. Everything in it is the fold of its facts, except what is marked as evidence.

    Evidence (lease deadlines, who is connected) is never stored: a server that starts again gives every lease
    a full new term, and every deadline starts afresh.
    """

    run_id: str
    # Whether the run began. Before, it may have numbers already: those of an expired run of its name, which go on.
    created: bool = False
    # A new one each time a run of this name is created; leases are compared within one only.
    incarnation: str = ""
    settings: RunSettings = RunSettings()
    revision: int = 0
    phase: Phase = Phase.JOINABLE
    round: int = 0
    restart_count: int = 0
    # Who holds a lease, in the order of joining.
    nodes: dict[str, Node] = field(default_factory=dict)

    # Nodes that announced their leaving, in that order, with the time by which they must have gone. Their old
    # workers may be alive, so no round is formed before.
    departing: dict[str, float] = field(default_factory=dict)

    # Nodes that were taken out and that are refused.
    evicted: dict[str, Eviction] = field(default_factory=dict)

    # The round that is FROZEN or FINAL; empty in the other phases.
    seats: dict[str, Seat] = field(default_factory=dict)
    group_world_size: int = 0
    world_size: int = 0
    master_address: str = ""
    fencing_token: int = 0
    unconfirmed: set[str] = field(default_factory=set)
    succeeded: set[str] = field(default_factory=set)
    # Whether any participant succeeded, also one that has gone since.
    finishing: bool = False
    # Whether those that succeeded need wait for the others no longer.
    exit_barrier_passed: bool = False
    master_port: int = 0

    # Of the last round that was FINAL: ranks, so that survivors keep them, and size, so that a round that lost no node,
    # or had a spare for each that it lost, needs no last call. Newcomers that failed on probation do not count in it.
    former_ranks: Mapping[str, int] = field(default_factory=dict)
    former_size: int = 0
    former_fencing_token: int = 0
    last_round_end: RoundEnd | None = None
    run_end: RunEnd | None = None

    # What must end the round, found by apply and acted on by next_consequence.
    breach: RoundEnd | None = None

    # The first failure of the round, over all nodes, and the first that no restart can mend; with whose failures are
    # known. They stay until the next round is FINAL: some come to be known only once their round has ended.
    failure: WorkerFailure | None = None
    permanent_failure: WorkerFailure | None = None
    failed_workers: set[FailedWorker] = field(default_factory=set)
    # The round that ended with a counted restart, until the next one is FINAL; 0: there is none. A node that is lost
    # meanwhile may turn out to be the cause, and the restart no longer counts.
    counted_round: int = 0

    # Restarts that may count against a budget, the oldest first; empty where their number is enough.
    restarts: list[FailureRestart] = field(default_factory=list)
    # How many of the latest restarts in a row came soon after the one before.
    quick_restarts: int = 0

    # Newcomers on probation, the scale-ups that failed in a row, and those of single nodes, the oldest first.
    newcomers: set[str] = field(default_factory=set)
    failed_scale_ups: int = 0
    failed_scale_ups_of: dict[str, int] = field(default_factory=dict)
    newcomers_held_until: float = -math.inf
    held_until_of: dict[str, float] = field(default_factory=dict)
    # Evidence: leases of the newcomers that were in the round of the last scale-up that failed, and not its cause.
    excused: set[int] = field(default_factory=set, compare=False)

    last_call_deadline: float | None = None
    confirm_deadline: float | None = None
    exit_barrier_deadline: float | None = None
    scale_up_deadline: float | None = None
    # Until when the end of the run waits for reports of others (None: no longer), and the next round is held back.
    settle_deadline: float | None = None
    hold_until: float | None = None
    # Evidence: seconds by which the clock of leases and deadlines is behind one that forgives no pauses. By the latter
    # ages of failures are reckoned.
    forgiven: float = field(default=0.0, compare=False)
    # Evidence, by the clock that forgives nothing: since when the round is FINAL, and when its first failure was; -inf:
    # longer ago than this server knows.
    final_at: float = field(default=-math.inf, compare=False)
    first_failed_at: float = field(default=-math.inf, compare=False)
    # Evidence: when the first failure of the round was reported, and participants without a sign of life since then.
    failure_reported_at: float = field(default=-math.inf, compare=False)
    silent: set[str] = field(default_factory=set, compare=False)
    # Evidence: nodes that hold a lease and have no open stream.
    disconnected: set[str] = field(default_factory=set, compare=False)
    # Evidence: since when nobody holds a lease; None: somebody does.
    idle_since: float | None = None
    # Evidence: when the server last woke from a pause that may have broken streams, and when a node last came back.
    woke_at: float = field(default=-math.inf, compare=False)
    returned_at: float = field(default=-math.inf, compare=False)
    # Evidence: (deadline, node_id, lease) of every lease, a heap. One entry per lease is live, and
    # may be too early, never too late; others wait to be taken off.
    lease_queue: list[tuple[float, str, int]] = field(default_factory=list)

    @property
    def waiting(self) -> list[Node]:
        """Nodes without a seat, in the order of joining."""
        return [
            node
            for node in self.nodes.values()
            if node.node_id not in self.seats and node.node_id not in self.departing
        ]

    @property
    def present(self) -> int:
        """Number of nodes that can be in the next round."""
        return len(self.nodes) - len(self.departing)

    @property
    def held_up(self) -> bool:
        """Whether a leaving node may still have workers of the round before; a spare that goes never had any."""
        return any(node_id in self.former_ranks for node_id in self.departing)

    @property
    def settling(self) -> bool:
        """Whether the round has failed, and is kept until its cause is known: a worker, or the loss of a node."""
        breach = self.breach
        return (
            self.phase is Phase.FINAL and breach is not None and breach.cause is RoundEndCause.WORKER_FAILED
        )

    @property
    def has_room(self) -> bool:
        """Whether nodes wait that the round could hold."""
        return len(self.seats) < self.settings.max_nodes and self.present > len(self.seats)
