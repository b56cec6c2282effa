"""Refusals of the fenced state: why a request was not carried out. To lose against another is none of them."""

from __future__ import annotations

from dataclasses import dataclass


class StateRefusal(Exception):
    """A request was refused; nothing has changed."""


@dataclass(eq=False)
class OperationSuperseded(StateRefusal):
    """The operation's slot has gone on to a later one."""

    slot: str
    sequence: int
    latest: int

    def __str__(self) -> str:
        return f"operation {self.sequence} of slot {self.slot} comes too late: the slot is at {self.latest}"


@dataclass(eq=False)
class OperationReused(StateRefusal):
    """The operation's number was used for another request."""

    slot: str
    sequence: int

    def __str__(self) -> str:
        return (
            f"operation {self.sequence} of slot {self.slot} was another request; "
            "a new request needs a greater sequence than the one before in its slot"
        )


@dataclass(eq=False)
class TooManyStates(StateRefusal):
    """No room for one more run's state."""

    limit: int

    def __str__(self) -> str:
        return f"{self.limit:,} runs have a state, the most that this service keeps; unused ones expire"


@dataclass(eq=False)
class StatesFull(StateRefusal):
    """No room for so many bytes."""

    run_id: str
    used_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"the state of run {self.run_id!r} would bring all states to {self.used_bytes:,} bytes, past the "
            f"limit of {self.limit_bytes:,}; make it smaller, or wait until unused ones expire"
        )


@dataclass(eq=False)
class StateBusy(StateRefusal):
    """Too many bytes are waiting to be written."""

    queued_bytes: int

    def __str__(self) -> str:
        return f"{self.queued_bytes:,} bytes of states wait to be written; try again in a moment"


@dataclass(eq=False)
class TooManyWatchers(StateRefusal):
    """No room for one more watcher."""

    limit: int

    def __str__(self) -> str:
        return f"{self.limit:,} watch a state, the most that this service serves; try again later"


@dataclass(eq=False)
class Draining(StateRefusal):
    """The server is going away."""

    def __str__(self) -> str:
        return "the state service is shutting down; repeat the request"


@dataclass(eq=False)
class JournalFailed(StateRefusal):
    """The state could not be made durable; whether it is, is unknown."""

    detail: str

    def __str__(self) -> str:
        return f"the state could not be made durable: {self.detail}"
