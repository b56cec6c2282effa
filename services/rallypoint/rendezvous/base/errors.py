"""Errors of the rendezvous that its parts share; `error_table` says how they go over the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from rallypoint.rendezvous.core import commands


class StreamReplaced(Exception):
    """The node opened a newer stream with the same lease."""


@dataclass(eq=False)
class EventsCompacted(Exception):
    """Events from `revision` on are asked for, and only those from `oldest_revision` on are kept."""

    run_id: str
    revision: int
    oldest_revision: int

    def __str__(self) -> str:
        return (
            f"event {self.revision} of run {self.run_id!r} is no longer kept: "
            f"the oldest that is has revision {self.oldest_revision}"
        )


class Draining(commands.Refused):
    """The server is going away: its streams end, and are resumed elsewhere or later, as calls are repeated."""

    retry_after: ClassVar[float] = 0.1

    def __str__(self) -> str:
        return "the server is going away: connect again, and resume or repeat what was under way"


@dataclass(eq=False)
class NotOwner(commands.Refused):
    """The run belongs to another replica, or to nobody at the moment. Nothing was done.

    Attributes:
        run_id: The run; "" where several were asked for.
        owner: Where the replica that owns it is reached, host:port; None: nobody owns it, or it is not known yet.
        cause: Why nobody does, if it is not just that nobody has come to it yet; for people.
    """

    run_id: str
    owner: str | None = None
    cause: str = ""

    @property
    def retry_after(self) -> float | None:
        """Seconds: while nobody owns the run, that will soon change. Who owns it can be asked at once."""
        return _NO_OWNER_RETRY if self.owner is None else None

    def __str__(self) -> str:
        return f"nothing was done: {_whose(self.run_id, self.owner, self.cause)}"


class EtcdAway(commands.Refused):
    """This replica has no etcd at the moment: which runs there are, and where, is not known here. Nothing was done."""

    retry_after: ClassVar[float] = 0.5

    def __str__(self) -> str:
        return "this replica can't reach etcd at the moment: ask another replica, or this one in a moment"


@dataclass(eq=False)
class EtcdFull(commands.Refused):
    """etcd takes no writes until somebody makes room. Nothing was done; what is only read is answered.

    Attributes:
        cause: What etcd says, and what to do.
    """

    cause: str
    retry_after: ClassVar[float] = 5.0

    def __str__(self) -> str:
        return f"nothing was done, for etcd is full: {self.cause}"


@dataclass(eq=False)
class RunBroken(commands.Refused):
    """An error that nobody expected stopped the run; other runs go on. Nothing of its journal was deleted.

    Attributes:
        run_id: The run.
        cause: The kind of the error; the log of the service has it whole.
    """

    run_id: str
    cause: str

    def __str__(self) -> str:
        return (
            f"run {self.run_id!r} is stopped: the service met with an unexpected {self.cause} in it, which its log "
            "has in full; start the service again, with a version where that is mended, or use another run id"
        )


@dataclass(eq=False)
class OutcomeUnknown(commands.Refused):
    """The run went to another replica while the request was under way: it may have taken effect, or not.

    Attributes:
        run_id: The run.
        owner: As that of `NotOwner`.
    """

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
    what = f"run {run_id!r}" if run_id else "what was asked for"
    if cause:
        return f"nobody owns {what}, and it can't be had: {cause}"
    if owner is None:
        return f"{what} is being taken over by another replica; ask again in a moment"
    return f"{what} belongs to the replica at {owner}; ask there"


Refusal: TypeAlias = Callable[[str], commands.Refused]
"""Makes the refusal of a request for the run of that name. A new one each time: one that is raised again and again
would collect every traceback."""


def draining_error(run_id: str) -> commands.Refused:
    """The refusal of whoever asks a server that is going away."""
    return Draining()


def of_unknown_outcome(refusal: commands.Refused) -> commands.Refused:
    """What a request that was under way ends with, where one that was not begun is told `refusal`."""
    return OutcomeUnknown(refusal.run_id, refusal.owner) if isinstance(refusal, NotOwner) else refusal
