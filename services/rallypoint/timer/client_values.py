"""What goes into and comes out of the agent's end of the timer service."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rallypoint.rpc.clock import LagSettings


@dataclass(frozen=True, slots=True)
class ExpiredTimer:
    """A timer that ran out. Durations in seconds."""

    worker_id: str
    scope: str
    after: float
    # From its deadline to when the service told.
    late_by: float
    # 0: acquired by a single call to the service; this client knows nothing of it.
    sequence: int
    # How many completions `after` was learned from; 0: it was given.
    learned_from: int = 0


OnExpired = Callable[[ExpiredTimer], Awaitable[bool | None]]
"""Deals with an expiry. False: it could not; the service will tell it again. An exception counts as done."""

OnForgotten = Callable[[str], None]
"""Told a scope of which the service is to learn anew: what was seen of it so far must not come back."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """How the client talks. All in seconds."""

    # How long changes are gathered before they are sent, at most; a timer that begins is told of within a tenth of
    # its duration. Default 0.2. Deadlines don't suffer: the time that has passed is sent along. It is the number of
    # messages that costs the service: with 64 agents, 0.05 costs it half as much again. Higher shows people timers
    # that have ended.
    linger: float = 0.2
    # The wait before the first attempt to reconnect, and the longest between two. Each is drawn between half of
    # it and all of it, then doubled. Defaults 0.1 and 5: a restarted service is found soon, and a thousand agents
    # don't come back in one instant.
    back_off: float = 0.1
    back_off_most: float = 5.0
    # How long the service may be out of reach before the log says so. Default 5.
    patience: float = 5.0
    # How pauses of this process are noticed and forgiven its workers: see LagSettings. Its tolerance is 0.25 here,
    # more than the service's: a worker is looked at before it is judged, so only those pauses count in which it
    # could not run either. Those of an agent on a busy host would only make reaping late.
    lag: LagSettings = field(default_factory=lambda: LagSettings(tolerance=0.25))
