"""Refusals of the store: why a request was not carried out, with fields for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rpc.text import clip

# Seconds until a retry: when something may have expired or ended, or after a few commits on a slow disk.
_FULL_RETRY = 5.0
_BUSY_RETRY = 0.1


@dataclass(eq=False)
class RoundNotBegun(Refused):
    """The round has not begun yet."""

    run_id: str
    round: int
    current_round: int

    def __str__(self) -> str:
        return f"round {self.round} of run {self.run_id!r} has not begun; its latest is {self.current_round}"


@dataclass(eq=False)
class NotAnInteger(Refused):
    """Add to a value that is no integer."""

    key: str
    value: bytes

    def __str__(self) -> str:
        shown = self.value[:40]
        return f"key {self.key!r} holds {shown!r}, not a 64-bit decimal integer: nothing can be added to it"


@dataclass(eq=False)
class IntegerOverflow(Refused):
    """Add past 64 bits."""

    key: str
    value: int
    amount: int

    def __str__(self) -> str:
        return f"{self.value} of key {self.key!r} plus {self.amount} does not fit into 64 bits"


@dataclass(eq=False)
class ValueTooLarge(Refused):
    """Append past the largest value."""

    key: str
    length: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"appending to key {self.key!r} would make its value {self.length:,} bytes long; a value has at most "
            f"{self.limit_bytes:,}, so go on under another key"
        )


@dataclass(eq=False)
class RunStoreFull(Refused):
    """The run's bytes are used up."""

    run_id: str
    key: str
    used_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"setting key {self.key!r} would bring the store of run {self.run_id!r} to {self.used_bytes:,} "
            f"bytes, past its limit of {self.limit_bytes:,}; delete keys that are no longer needed"
        )


@dataclass(eq=False)
class StoresFull(Refused):
    """The bytes of all runs together, or of the runs of a client, are used up."""

    run_id: str
    used_bytes: int
    limit_bytes: int
    client: str = ""
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        runs = f"the runs of client {self.client!r}" if self.client else "all runs"
        return (
            f"the stores of {runs} use {self.used_bytes:,} bytes, and a write to that of run {self.run_id!r} would "
            f"exceed the limit of {self.limit_bytes:,}; delete keys or runs that are no longer needed"
        )


@dataclass(eq=False)
class TooManyKeys(Refused):
    """The run has no room for another key."""

    run_id: str
    key: str
    limit_keys: int

    def __str__(self) -> str:
        return (
            f"setting key {self.key!r} would give run {self.run_id!r} more than the {self.limit_keys:,} keys that "
            "it may have; delete keys that are no longer needed"
        )


@dataclass(eq=False)
class AnswerTooLarge(Refused):
    """Values that don't fit into one response; `fitting`: how many of the first keys do."""

    keys: int
    total_bytes: int
    limit_bytes: int
    fitting: int

    def __str__(self) -> str:
        return (
            f"the values of these {self.keys:,} keys take {self.total_bytes:,} bytes, an answer at most "
            f"{self.limit_bytes:,}; ask for fewer keys at once: the first {self.fitting:,} fit"
        )


@dataclass(eq=False)
class TooManyWaiters(Refused):
    """So many requests of the run wait for keys, or for so many keys, that there is no room for another."""

    run_id: str
    waiters: int
    waited_keys: int
    retry_after: float

    def __str__(self) -> str:
        return (
            f"{self.waiters:,} requests of run {self.run_id!r} wait for {self.waited_keys:,} keys, and there is no "
            "room for this one; try again in a moment"
        )


@dataclass(eq=False)
class StoreBusy(Refused):
    """Too many bytes are waiting to be written."""

    run_id: str
    queued_bytes: int
    retry_after: float

    def __str__(self) -> str:
        return f"{self.queued_bytes:,} bytes of run {self.run_id!r} wait to be written; try again in a moment"


@dataclass(eq=False)
class OperationSuperseded(Refused):
    """The operation's slot has gone on to a later one."""

    slot: str
    sequence: int
    latest: int

    def __str__(self) -> str:
        return f"operation {self.sequence} of slot {self.slot} comes too late: the slot is at {self.latest}"


@dataclass(eq=False)
class OperationReused(Refused):
    """The operation's number was used for another request."""

    slot: str
    sequence: int

    def __str__(self) -> str:
        return (
            f"operation {self.sequence} of slot {self.slot} was another request; "
            "a new request needs a greater sequence than the one before in its slot"
        )


@dataclass(eq=False)
class KeyWaitTimedOut(Refused):
    """Keys were still missing when the wait was over."""

    run_id: str
    missing: Sequence[str]
    timeout: float

    # Messages and metadata travel as HTTP/2 headers, which have room for 16 KiB.
    SHOWN_KEYS = 8
    SHOWN_BYTES = 64

    @property
    def shown(self) -> list[str]:
        """The first missing keys, long ones shortened."""
        return [clip(key, self.SHOWN_BYTES, "…") for key in self.missing[: self.SHOWN_KEYS]]

    def __str__(self) -> str:
        count, shown = len(self.missing), ", ".join(map(repr, self.shown))
        if count > self.SHOWN_KEYS:
            shown += f" and {count - self.SHOWN_KEYS} more"
        keys = f"key {shown} was" if count == 1 else f"{count} keys ({shown}) were"
        return f"{keys} not set in run {self.run_id!r} within {round(self.timeout, 3):g} s"


@dataclass(eq=False)
class JournalFailed(Refused):
    """The write could not be made durable."""

    detail: str

    def __str__(self) -> str:
        return f"the write could not be made durable: {self.detail}"


# ---- Refusals of the fenced state: why a request was not carried out. A lost race against another set is not one.


@dataclass(eq=False)
class TooManyStates(Refused):
    """No room for one more run's state, in the service or among those of a client."""

    limit: int
    client: str = ""
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        if self.client:
            return (
                f"client {self.client!r} has created {self.limit:,} states, the most that one may; delete runs that "
                "are over (`rallypoint delete`), wait until unused states expire, or raise --max-states-per-client"
            )
        return f"{self.limit:,} runs have a state, the most that this service keeps; raise --max-states"


@dataclass(eq=False)
class StatesFull(Refused):
    """No room for so many bytes, in the service or among those of a client."""

    run_id: str
    used_bytes: int
    limit_bytes: int
    client: str = ""
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        states = f"the states of client {self.client!r}" if self.client else "all states"
        return (
            f"the state of run {self.run_id!r} would bring {states} to {self.used_bytes:,} bytes, past the "
            f"limit of {self.limit_bytes:,}; make it smaller, or wait until unused ones expire"
        )


@dataclass(eq=False)
class StateBusy(Refused):
    """Too many bytes are waiting to be written."""

    queued_bytes: int
    retry_after: ClassVar[float] = _BUSY_RETRY

    def __str__(self) -> str:
        return f"{self.queued_bytes:,} bytes of states wait to be written; try again in a moment"


@dataclass(eq=False)
class TooManyWatchers(Refused):
    """No room for one more watcher."""

    limit: int
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        return f"{self.limit:,} clients watch states, the most that this service serves; raise --max-state-watchers"
