"""What the watchdog's core is told and tells: settings, names, expiries, views."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rallypoint.serving.lag import LagSettings


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


@dataclass(frozen=True, slots=True)
class Expiry:
    """A timer that ran out, to be told to its node's agent."""

    expiry_id: int
    name: TimerName
    after: float
    # Seconds from the deadline that the worker was given to now, forgiven lag included.
    late_by: float
    sequence: int
    # How many times it has been told, with this one.
    offers: int


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

    COUNTING = "counting"
    OFFERED = "offered"
    UNCLAIMED = "unclaimed"


@dataclass(frozen=True, slots=True)
class TimerView:
    """A timer as people see it. `remaining` is negative once it has run out."""

    name: TimerName
    after: float
    remaining: float
    state: TimerState
    offers: int
