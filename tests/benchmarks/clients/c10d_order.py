"""What the peer is asked to do, and what it answers; apart from the peer, since this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class C10dOrder:
    """What to do.

    Attributes:
        kind: of clients.c10d.KINDS.
        members: how many do it at once.
        each: how often each does it.
        port: the store's, in a process that has a share of the members.
        share: how many members such a process has.
        endpoint: of the rendezvous service, for the kinds that are of ours.
    """

    kind: str
    members: int
    each: int = 1
    port: int = 0
    share: int = 0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class C10dResult:
    """Seconds from the start until the first and the last member had done it."""

    first: float
    last: float
