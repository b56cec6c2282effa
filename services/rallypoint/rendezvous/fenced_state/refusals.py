"""Refusals of the fenced state: why a request was not carried out. To lose against another is none of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rallypoint.rendezvous.core.refusals import Refused

# When to come back, seconds: when something may have expired or ended, or after a few commits on a slow disk.
_FULL_RETRY = 5.0
_BUSY_RETRY = 0.1


@dataclass(eq=False)
class TooManyStates(Refused):
    """No room for one more run's state."""

    limit: int
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        return f"{self.limit:,} runs have a state, the most that this service keeps; unused ones expire"


@dataclass(eq=False)
class StatesFull(Refused):
    """No room for so many bytes."""

    run_id: str
    used_bytes: int
    limit_bytes: int
    retry_after: ClassVar[float] = _FULL_RETRY

    def __str__(self) -> str:
        return (
            f"the state of run {self.run_id!r} would bring all states to {self.used_bytes:,} bytes, past the "
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
        return f"{self.limit:,} watch a state, the most that this service serves; try again later"
