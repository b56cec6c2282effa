"""What the watchdog's core is told and tells: settings, names, expiries, views."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, NamedTuple

from rallypoint.rpc.clock import LagSettings


@dataclass(frozen=True, slots=True)
class TimerSettings:
    """What a timer service may be told. Durations in seconds."""

    # How long an expiry waits for its acknowledgement before it is told again. Default 5: an agent may gather
    # evidence for 2 s before it kills. A repeat costs one message, so lower is cheap; higher delays a reaping
    # whose first message was lost inside the agent.
    reoffer_interval: float = 5.0
    # How long an expiry without a subscribed agent, and the lease of a node without timers, are remembered.
    # Default 3600: long enough for an operator to look. Costs memory only.
    retention: float = 3600.0
    # Most timers of one node, so that one run can't starve the others. Default 65,536: 64 workers with 1,024.
    max_timers_per_node: int = 65_536
    # Most timers in all. Default 1,000,000: about half a gigabyte.
    max_timers: int = 1_000_000
    # Most nodes known at once. Default 100,000.
    max_nodes: int = 100_000
    # Completions of a scope, over all workers of its run, before a timer that learns can run out. Default 20: a
    # worker's first times (compiling, filling caches) should be among them. Higher guards later, lower judges by
    # less.
    learn_warm_up: int = 20
    # A timer that learns runs out after so many times the longest completion. Default 5: a step that shares its
    # disk or network with another job takes two or three times as long and must live. A hang costs this much.
    learn_factor: float = 5.0
    # The shortest duration that is learned, in seconds. Default 10: where a step takes milliseconds, a garbage
    # collection or a page fault is many times that. Lower finds hangs of short scopes sooner.
    learn_least: float = 10.0
    # Most scopes of which one run may learn. Default 4,096: a program has some dozens; one that puts a number
    # into a scope's name has no end of them.
    max_scopes_per_run: int = 4096
    # Most scopes in all. Default 200,000: about 100 megabytes. One more takes the place of those of the run that
    # has been without a node for longest.
    max_scopes: int = 200_000
    # Most runs of which something learned is kept. Default 10,000. One more takes a place likewise.
    max_learned_runs: int = 10_000
    # How long what was learned is kept after the run's last node is forgotten, in seconds. Default seven days: a
    # job that is started again after a weekend need not learn anew. Costs memory only.
    learned_retention: float = 7 * 24 * 3600.0
    # A run whose workers tell progress is reported when none has advanced for so long, in seconds; None: never.
    # Default 600: longer than most evaluations and checkpoints. Lower reports sooner, and more in vain; nothing
    # is killed for it.
    stall_after: float | None = 600.0
    lag: LagSettings = field(default_factory=LagSettings)


class TimerName(NamedTuple):
    """What there is one timer of."""

    run_id: str
    node_id: str
    worker_id: str
    scope: str


@dataclass(frozen=True, slots=True)
class Subscription:
    """An agent's right to carry the timers of its node; the highest number is the one in force."""

    run_id: str
    node_id: str
    lease: int
    number: int
    # Of the run, whose lease it is; "": not known.
    incarnation: str = ""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run has learned of a scope."""

    scope: str
    # Completions that were seen: at least so many happened. 0: it was forgotten.
    count: int
    # The longest of them, in seconds.
    longest: float


@dataclass(frozen=True, slots=True)
class Expiry:
    """A timer that ran out, to be told to its node's agent."""

    expiry_id: int
    name: TimerName
    # As given, or as learned by the time that it ran out.
    after: float
    # Seconds from the deadline that the worker was given to now, forgiven lag included.
    late_by: float
    sequence: int
    # How many times it has been told, with this one.
    offers: int
    # What `after` was learned from; None if it was given.
    learned: Learned | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """What came of the passing of time."""

    # To tell now, in the order in which they ran out. Each has a subscriber.
    expiries: list[Expiry]
    # Ran out with nobody subscribed for their node.
    unclaimed: int
    # Unclaimed for so long that they were dropped.
    abandoned: int
    # Seconds by which every deadline was moved because the watchdog was not watching.
    forgiven: float


class TimerState(Enum):
    """How far a timer has come."""

    # How long it may take is not known yet: it can't run out.
    LEARNING = "learning"
    COUNTING = "counting"
    OFFERED = "offered"
    UNCLAIMED = "unclaimed"


RAN_OUT = frozenset({TimerState.OFFERED, TimerState.UNCLAIMED})
"""States of timers that ran out."""


@dataclass(frozen=True, slots=True)
class TimerView:
    """A timer as people see it. `remaining` is negative once it has run out."""

    name: TimerName
    # None while it is LEARNING, both.
    after: float | None
    remaining: float | None
    state: TimerState
    offers: int
    # The scope that it learns from; empty: its duration was given.
    learned_as: str = ""


@dataclass(frozen=True, slots=True)
class ScopeView:
    """A scope of which a run learns, as people see it."""

    run_id: str
    learned: Learned
    # How long its timers may take; None until enough was seen.
    after: float | None
    # How many timers go by it now.
    timers: int


# ---- Refusals: why a request was not taken. Each carries what a program needs, and says it in one sentence.


class Refused(Exception):
    """A request was refused; no timer has changed."""

    # The machine reason that travels; see timer_service.proto.
    reason: ClassVar[str]


@dataclass(eq=False)
class InvalidField(Refused):
    """A field is malformed, whatever the state of the service."""

    reason: ClassVar[str] = "INVALID_ARGUMENT"
    field: str
    problem: str

    def __str__(self) -> str:
        return f"{self.field}: {self.problem}"


@dataclass(eq=False)
class LeaseLost(Refused):
    """A newer lease of the node is known: of a higher number, or of a newer incarnation of the run."""

    reason: ClassVar[str] = "LEASE_LOST"
    run_id: str
    node_id: str
    lease: int
    current: int
    # The two are of different incarnations of the run.
    of_other_run: bool = False

    def __str__(self) -> str:
        if self.of_other_run:
            return (
                f"node {self.node_id!r} of run {self.run_id!r} is in a newer run of that name by now, with lease "
                f"{self.current}: lease {self.lease} is of the one before"
            )
        return (
            f"node {self.node_id!r} of run {self.run_id!r} no longer holds lease {self.lease}: "
            f"lease {self.current} superseded it"
        )


@dataclass(eq=False)
class StreamReplaced(Refused):
    """The node opened a newer stream with the same lease."""

    reason: ClassVar[str] = "STREAM_REPLACED"
    run_id: str
    node_id: str

    def __str__(self) -> str:
        return f"node {self.node_id!r} of run {self.run_id!r} opened a newer stream"


@dataclass(eq=False)
class TooMany(Refused):
    """A bound of the service is reached."""

    reason: ClassVar[str] = "TOO_MANY_TIMERS"
    what: str
    limit: int
    mend: str = "release some first"

    def __str__(self) -> str:
        return f"{self.what}: the service holds at most {self.limit:,}; {self.mend}"


class Draining(Refused):
    """The service is going away."""

    reason: ClassVar[str] = "DRAINING"

    def __str__(self) -> str:
        return "the timer service is going away; reconnect"


# ---- What may name a run, a node, a worker or a scope.


MAX_NAME_BYTES = 256
# Twice what a worker may name: room for what its agent adds to tell equal scopes apart.
MAX_SCOPE_BYTES = 512


def check_name(field: str, value: str, limit: int = MAX_NAME_BYTES) -> None:
    """Refuses a name that is empty or too long.

    Args:
        field: what it is the value of, for the refusal.
        value: the name.
        limit: most bytes of UTF-8.

    Raises:
        InvalidField: it is.
    """
    if not value:
        raise InvalidField(field, "must not be empty")
    # No character takes more than four bytes: the usual short name is not encoded just to be measured.
    if len(value) * 4 > limit and len(value.encode()) > limit:
        raise InvalidField(field, f"must have at most {limit} bytes of UTF-8")
