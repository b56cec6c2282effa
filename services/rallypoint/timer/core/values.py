"""Values of the watchdog's core: settings, names, expiries, views, refusals."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple

from rallypoint.rpc.clock import LagSettings


@dataclass(frozen=True, slots=True)
class TimerSettings:
    """The settings of a timer service. Durations in seconds."""

    # How long an expiry waits for its acknowledgement before it is sent again. Default 5: an agent may collect
    # diagnostics for 2 s before it kills. A repeat costs one message, so lower is cheap; higher delays a kill whose
    # first message was lost inside the agent.
    reoffer_interval: float = 5.0
    # How long an expiry without a subscribed agent, and the lease of a node without timers, are kept. Default 3600:
    # long enough for an operator to look. Costs memory only.
    retention: float = 3600.0
    # Most timers of one node, so that one run can't starve the others. Default 65,536: 64 workers with 1,024.
    max_timers_per_node: int = 65_536
    # Most timers in all. Default 1,000,000: about half a gigabyte.
    max_timers: int = 1_000_000
    # Most nodes known at once. Default 100,000.
    max_nodes: int = 100_000
    # Completions of a scope, over all workers of its run, before a learning timer can expire. Default 20: it should
    # cover a worker's first, slow passes (compiling, filling caches). Higher starts guarding later; lower decides
    # on less data.
    learn_warm_up: int = 20
    # A learning timer expires after the longest completion times this factor. Default 5: a step that shares its
    # disk or network with another job takes two or three times as long and must live. Higher detects a hang later.
    learn_factor: float = 5.0
    # The shortest learned timeout. Default 10: where a step takes milliseconds, a garbage collection or a page
    # fault is many times that. Lower finds hangs of short scopes sooner.
    learn_least: float = 10.0
    # Most learned scopes of one run. Default 4,096: a program has some dozens; a program that puts a number into
    # scope names creates an unlimited number.
    max_scopes_per_run: int = 4096
    # Most learned scopes in all. Default 200,000: about 100 megabytes. A further one evicts the scopes of the run
    # that has had no node for longest.
    max_scopes: int = 200_000
    # Most runs with learned scopes. Default 10,000. A further one evicts in the same way.
    max_learned_runs: int = 10_000
    # How long learned scopes are kept after the run's last node is forgotten. Default seven days: a job that is
    # started again after a weekend keeps its learned timeouts. Costs memory only.
    learned_retention: float = 7 * 24 * 3600.0
    # A run whose workers report progress is reported as stalled when none has advanced for so long; None: never.
    # Default 600: longer than most evaluations and checkpoints. Lower reports sooner, with more false alarms; a
    # stall report kills nothing.
    stall_after: float | None = 600.0
    lag: LagSettings = field(default_factory=LagSettings)


class TimerName(NamedTuple):
    """The name of a timer; a service has at most one timer of each name."""

    run_id: str
    node_id: str
    worker_id: str
    scope: str


@dataclass(frozen=True, slots=True)
class Subscription:
    """An agent's right to manage the timers of its node; the highest number is in force."""

    run_id: str
    node_id: str
    lease: int
    number: int
    # The incarnation of the run that granted the lease; "": unknown.
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Learned:
    """The completions of a scope that a run has seen."""

    scope: str
    # A lower bound of the completions seen. 0: the scope was forgotten.
    count: int
    # The longest of them, in seconds.
    longest: float


@dataclass(frozen=True, slots=True)
class Expiry:
    """An expired timer, to be sent to the agent of its node."""

    expiry_id: int
    name: TimerName
    # The timeout in seconds: given, or the learned one at expiry.
    after: float
    # Seconds from the deadline that the worker was given until now, including forgiven lag.
    late_by: float
    sequence: int
    # How many times it has been sent, including this time.
    offers: int
    # The data `after` was learned from; None: `after` was given.
    learned: Learned | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """The result of one step of time."""

    # To send now, in order of expiry. Each has a subscriber.
    expiries: list[Expiry]
    # Expired while their node had no subscriber.
    unclaimed: int
    # Dropped after `retention` seconds without a subscriber.
    abandoned: int
    # Seconds by which every deadline was moved because the watchdog was paused.
    forgiven: float


class TimerState(Enum):
    """The state of a timer."""

    # The learned timeout is not known yet: the timer can't expire.
    LEARNING = "learning"
    COUNTING = "counting"
    OFFERED = "offered"
    UNCLAIMED = "unclaimed"


RAN_OUT = frozenset({TimerState.OFFERED, TimerState.UNCLAIMED})
"""The states of expired timers."""


@dataclass(frozen=True, slots=True)
class TimerView:
    """A timer in a list. `remaining` is negative once it has expired."""

    name: TimerName
    # Both None while LEARNING.
    after: float | None
    remaining: float | None
    state: TimerState
    offers: int
    # The scope it learns from; empty: its timeout was given.
    learned_as: str = ""


@dataclass(frozen=True, slots=True)
class ScopeView:
    """A learned scope in a list."""

    run_id: str
    learned: Learned
    # The timeout of its timers; None: too few completions so far.
    after: float | None
    # The number of timers that use it.
    timers: int


# ---- Refusals: why a request was rejected. Each carries fields for programs and one sentence for people.


class TimerRefused(Exception):
    """A request to the timer service was refused; no timer has changed."""

    # The reason sent on the wire; see timer_service.proto.
    reason: ClassVar[str]


@dataclass(eq=False)
class InvalidField(TimerRefused):
    """A field is malformed; the state of the service does not matter."""

    reason: ClassVar[str] = "INVALID_ARGUMENT"
    field: str
    problem: str

    @property
    def field_violations(self) -> list[tuple[str, str]]:
        """The (field, problem) pair, as a ServiceError has it."""
        return [(self.field, self.problem)]

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class LeaseSuperseded(TimerRefused):
    """A newer lease of the node is known: a higher number, or from a newer incarnation of the run."""

    reason: ClassVar[str] = "LEASE_LOST"
    run_id: str
    node_id: str
    lease: int
    current: int
    # True: the two leases belong to different incarnations of the run.
    of_other_run: bool = False

    def __str__(self) -> str:
        if self.of_other_run:
            return (
                f"node {self.node_id!r} has joined a newer run named {self.run_id!r}, with lease "
                f"{self.current}: lease {self.lease} belongs to the previous run"
            )
        return (
            f"node {self.node_id!r} of run {self.run_id!r} no longer holds lease {self.lease}: "
            f"lease {self.current} superseded it"
        )


@dataclass(eq=False)
class TakeoverUnconfirmed(TimerRefused):
    """An agent of another incarnation of the run is subscribed for the node: ask again, to show which is newer."""

    reason: ClassVar[str] = "TAKEOVER_UNCONFIRMED"
    run_id: str
    node_id: str

    def __str__(self) -> str:
        return (
            f"another agent is subscribed for node {self.node_id!r} of run {self.run_id!r}: subscribe again"
        )


@dataclass(eq=False)
class NotTheAgent(TimerRefused):
    """The node has an agent, and the caller does not prove that it is that one."""

    reason: ClassVar[str] = "LEASE_NOT_PROVEN"
    run_id: str
    node_id: str

    def __str__(self) -> str:
        return (
            f"node {self.node_id!r} of run {self.run_id!r} has an agent, and only that may set its timers: "
            "the token or the caller's name is not the agent's"
        )


@dataclass(eq=False)
class SubscriptionReplaced(TimerRefused):
    """The node opened a newer stream with the same lease."""

    reason: ClassVar[str] = "STREAM_REPLACED"
    run_id: str
    node_id: str

    def __str__(self) -> str:
        return f"node {self.node_id!r} of run {self.run_id!r} opened a newer stream"


@dataclass(eq=False)
class TooMany(TimerRefused):
    """A limit of the service is reached."""

    reason: ClassVar[str] = "TOO_MANY_TIMERS"
    problem: str
    limit: int
    remedy: str = "release some first"

    def __str__(self) -> str:
        return f"{self.problem}: the service holds at most {self.limit:,}; {self.remedy}"


# ---- Fields of requests: the names of runs, nodes, workers and scopes; seconds.


# Ten years: catches a mistake of units, and keeps sums of durations from overflowing.
MAX_AFTER = 315_360_000.0
MAX_NAME_BYTES = 256
# Twice the limit of a worker's scope: the agent may append a suffix to make equal scopes distinct.
MAX_SCOPE_BYTES = 512


def check_name(field: str, value: str, limit: int = MAX_NAME_BYTES) -> None:
    """Check that a name is neither empty nor longer than `limit` bytes of UTF-8.

    Raises:
        InvalidField: The name is empty or too long.
    """
    if not value:
        raise InvalidField(field, "must not be empty")
    # No character takes more than four bytes: the usual short name is not encoded just to be measured.
    if len(value) * 4 > limit and len(value.encode()) > limit:
        raise InvalidField(field, f"must have at most {limit} bytes of UTF-8")


def check_seconds(field: str, seconds: float) -> None:
    """Check a number of seconds. Raises InvalidField."""
    if not 0 <= seconds <= MAX_AFTER:
        raise InvalidField(field, "must be at least zero and at most ten years")
