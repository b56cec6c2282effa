"""The request to the peer, and its result; apart from the peer, since this module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class C10dOrder:
    """A request to the client process.

    Attributes:
        kind: a key of `clients.c10d.KINDS`.
        members: number of members, which start at once.
        each: number of calls of each member.
        port: port of the store, for a process with a share of the members.
        share: number of members of such a process.
        endpoint: address of the rendezvous service, for our kinds.
    """

    kind: str
    members: int
    each: int = 1
    port: int = 0
    share: int = 0
    endpoint: str = ""


@dataclass(frozen=True, slots=True)
class C10dResult:
    """Seconds from the start until the first and the last member were done."""

    first: float
    last: float
