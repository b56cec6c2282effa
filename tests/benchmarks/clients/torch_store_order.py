"""The request to torch's store clients, and its result; apart from them, since this module needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchStoreOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the rendezvous service; empty: torch's own server is measured.
        clients: number of processes.
        each: number of calls of a kind that each makes, one after another.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    clients: int
    each: int
    timeout: float


@dataclass(frozen=True, slots=True)
class TorchStoreResult:
    """Calls per second, all clients together; of a barrier: seconds until the last has passed it."""

    set: float
    get: float
    add: float
    barrier: float
