"""The check that leases expire on time: no sign of life for a time to live ends a lease, even if the disk is slow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rendezvous.core.ledger import require
from simulation.clockwork import SKEW

if TYPE_CHECKING:
    from simulation.referee import Subject
    from simulation.server import Server
    from simulation.wire import ServerCall

# Virtual seconds after a start of the service, and after a pause, for which it may extend leases.
_AFTER_START, _AFTER_PAUSE = 10.0, 75.0
_SLACK = 0.2


@dataclass(slots=True)
class Terms:
    """The signs of life that a service received from its nodes; `now` is the world's clock."""

    now: Callable[[], float]
    # Time of the last one, by node and lease.
    _signs: dict[tuple[str, int], float] = field(default_factory=dict)
    # Streams on which a node has sent a resume: the node counts as alive while such a stream is open.
    _returning: dict[ServerCall, None] = field(default_factory=dict)
    # The time at which the last commit was decided.
    _decided_at: float = 0.0

    def heard(self, call: ServerCall) -> None:
        """Note that a service receives a message on a stream."""
        subject = call.subject
        if subject is not None and subject.lease:
            self.told(subject)
            if not subject.admitted:
                self._returning[call] = None

    def told(self, subject: Subject) -> None:
        """Note that a service sends a node its lease, or receives a message from it."""
        self._signs[subject.node_id, subject.lease] = subject.sign_at = self.now()

    def durable(
        self, server: Server | None, leases: Mapping[str, int], time_to_live: float, decided_at: float
    ) -> None:
        """Check the leases that were held when the commit before this one was decided, if this commit is new.

        Raises:
            Violation: A lease had expired by then.
        """
        before, self._decided_at = self._decided_at, decided_at
        if decided_at <= before or server is None or server.draining:
            return
        for call in [*self._returning]:
            held = call.subject.node_id, call.subject.lease
            if not call.subject.admitted:
                self._signs[held] = max(self._signs.get(held, -math.inf), call.broken_at or self.now())
            if call.subject.admitted or call.done():
                del self._returning[call]
        now, process = self.now(), server.process
        spared = _AFTER_PAUSE if process.paused_since else _AFTER_START
        for held in leases.items():
            sign = self._signs.setdefault(held, now)
            ends = sign + time_to_live * (1 + 2 * SKEW) + _SLACK
            watched = process.awake_for(now - sign + spared)
            require(before <= ends or not watched, f"the lease of {held[0]} ends in its time")
