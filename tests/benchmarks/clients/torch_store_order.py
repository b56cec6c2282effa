"""What torch's store clients are asked to do, and what they answer; apart from them, since this needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TorchStoreOrder:
    """What to do.

    Attributes:
        endpoint: of the rendezvous service; empty: torch's own server is measured.
        clients: how many processes.
        each: how many calls of a kind each makes, one after another.
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
