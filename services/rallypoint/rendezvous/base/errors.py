"""Errors of the rendezvous that its parts share; `api/errors.py` maps them to gRPC errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from rallypoint.rendezvous.core import commands


class StreamReplaced(Exception):
    """The node opened a newer stream with the same lease."""


@dataclass(eq=False)
class EventsCompacted(Exception):
    """Events from `revision` on were requested, but only those from `oldest_revision` on are kept."""

    run_id: str
    revision: int
    oldest_revision: int

    def __str__(self) -> str:
        return (
            f"event {self.revision} of run {self.run_id!r} is no longer kept: "
            f"the oldest kept event has revision {self.oldest_revision}"
        )


class Draining(commands.Refused):
    """The server drains: its streams end, and clients resume them and repeat calls, here or at another replica."""

    retry_after: ClassVar[float] = 0.1

    def __str__(self) -> str:
        return "the server is going away: connect again, and resume or repeat what was under way"


@dataclass(eq=False)
class NotOwner(commands.Refused):
    """Another replica owns the run, or none does at the moment. Nothing was done.

    Attributes:
        run_id: The run; "" if several were requested.
        owner: Address of the replica that owns it, host:port; None: no replica owns it, or it is not known yet.
        cause: Why no replica can own it, if it is not just about to be claimed; for people.
    """

    run_id: str
    owner: str | None = None
    cause: str = ""

    @property
    def retry_after(self) -> float | None:
        """Seconds, while no replica owns the run: that will soon change. None: the owner can be called at once."""
        return _NO_OWNER_RETRY if self.owner is None else None

    def __str__(self) -> str:
        return f"nothing was done: {_whose(self.run_id, self.owner, self.cause)}"


class EtcdAway(commands.Refused):
    """This replica can't reach etcd at the moment: it does not know the runs and their owners. Nothing was done."""

    retry_after: ClassVar[float] = 0.5

    def __str__(self) -> str:
        return "this replica can't reach etcd at the moment: ask another replica, or this one in a moment"


@dataclass(eq=False)
class EtcdFull(commands.Refused):
    """etcd refuses writes until an operator makes room. Nothing was done; reads still work.

    Attributes:
        cause: The error of etcd, and the remedy.
    """

    cause: str
    retry_after: ClassVar[float] = 5.0

    def __str__(self) -> str:
        return f"nothing was done, because etcd is full: {self.cause}"


@dataclass(eq=False)
class RunBroken(commands.Refused):
    """An unexpected error stopped the run; other runs go on. Nothing of its journal was deleted.

    Attributes:
        run_id: The run.
        cause: The kind of the error; the log of the service has its traceback.
    """

    run_id: str
    cause: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} is stopped by an unexpected {self.cause} in the service (its log has the traceback); "
            "start the service again, with a version in which that is fixed, or use another run id"
        )


@dataclass(eq=False)
class OutcomeUnknown(commands.Refused):
    """The run moved to another replica while the request was under way: it may have taken effect, or not."""

    run_id: str
    owner: str | None = None

    @property
    def retry_after(self) -> float | None:
        """As that of `NotOwner`."""
        return _NO_OWNER_RETRY if self.owner is None else None

    def __str__(self) -> str:
        return f"the outcome is unknown: {_whose(self.run_id, self.owner)}"


# Seconds: claiming a shard takes some milliseconds once its owner's lease is over.
_NO_OWNER_RETRY = 0.1


def _whose(run_id: str, owner: str | None, cause: str = "") -> str:
    run = f"run {run_id!r}" if run_id else "one of the runs"
    if cause:
        return f"no replica owns {run}, and it can't be claimed: {cause}"
    if owner is None:
        return f"{run} is being taken over by another replica; try again in a moment"
    return f"{run} belongs to the replica at {owner}; send the request there"


Refusal: TypeAlias = Callable[[str], commands.Refused]
"""Makes the refusal of a request for the run of that name. A new one each time: one that is raised again and again
would collect every traceback."""


def draining_error(run_id: str) -> commands.Refused:
    """Return the refusal of a request to a server that drains."""
    return Draining()


def of_unknown_outcome(refusal: commands.Refused) -> commands.Refused:
    """Return the error of a request under way, if one that was not begun is refused with `refusal`."""
    return OutcomeUnknown(refusal.run_id, refusal.owner) if isinstance(refusal, NotOwner) else refusal
