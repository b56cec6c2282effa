"""Refusals: why a request was not taken. Each carries what a program needs, and says it in one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


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
