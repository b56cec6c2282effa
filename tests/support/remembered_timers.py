"""A timer client that only records the calls which the agent's timer socket makes for its workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.timer.client.client import ExpiredTimer, NodeTimers, OnExpired, OnForgotten


class RememberedTimers(NodeTimers):
    """A stand-in for the client of the timer service."""

    def __init__(self) -> None:
        # (worker, scope at the service) -> sequence number, seconds, start time.
        self.held: dict[tuple[str, str], tuple[int, float, float]] = {}
        self.acquired: list[tuple[str, str]] = []
        self.learned_as: dict[tuple[str, str], str] = {}
        self.completed: list[tuple[str, str]] = []
        self.observed: list[tuple[str, int, float]] = []
        # (worker, rank, step, start time).
        self.steps: list[tuple[str, int, int, float]] = []
        self.cleared: list[str] = []
        self.on_expired: OnExpired | None = None
        self.on_forgotten: OnForgotten | None = None
        self.sequence = 0
        self._news = asyncio.Event()

    def start(self, on_expired: OnExpired, on_forgotten: OnForgotten | None = None) -> None:
        self.on_expired, self.on_forgotten = on_expired, on_forgotten

    async def close(self, grace: float = 1.0) -> None:
        """As NodeTimers."""

    def acquire(
        self, worker_id: str, scope: str, after: float, since: float | None = None, learned_as: str = ""
    ) -> None:
        assert since is not None
        self.sequence += 1
        self.held[worker_id, scope] = (self.sequence, after, since)
        self.acquired.append((worker_id, scope))
        self.learned_as[worker_id, scope] = learned_as
        self._news.set()

    def release(self, worker_id: str, scope: str) -> None:
        """As NodeTimers, but only for a timer that is held."""
        del self.held[worker_id, scope]
        self._news.set()

    def complete(self, worker_id: str, scope: str) -> None:
        """As NodeTimers, but only for a timer that is held."""
        self.completed.append((worker_id, scope))
        self.release(worker_id, scope)

    def observe(self, scope: str, count: int, longest: float) -> None:
        self.observed.append((scope, count, longest))
        self._news.set()

    def progress(self, worker_id: str, rank: int, step: int, since: float) -> None:
        self.steps.append((worker_id, rank, step, since))
        self._news.set()

    def clear(self, worker_id: str) -> None:
        self.cleared.append(worker_id)

    def holds(self, expired: ExpiredTimer) -> bool:
        timer = self.held.get((expired.worker_id, expired.scope))
        return timer is not None and timer[0] == expired.sequence

    def scopes(self, worker_id: str = "0@1") -> list[str]:
        """Return the scopes of the timers that a worker holds."""
        return sorted(scope for worker, scope in self.held if worker == worker_id)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a recorded call makes the condition true."""
        while not condition():
            await self._news.wait()
            self._news.clear()

    async def expire(self, worker_id: str, scope: str) -> bool | None:
        """Deliver the expiry of the timer that is held now, as the service does."""
        return await self.tell(self.expired(worker_id, scope))

    def expired(self, worker_id: str, scope: str) -> ExpiredTimer:
        """The expiry of the timer that is held now."""
        sequence, after, _ = self.held[worker_id, scope]
        return ExpiredTimer(worker_id, scope, after, 0.01, sequence)

    async def tell(self, expired: ExpiredTimer) -> bool | None:
        """Deliver an expiry, as the service does."""
        assert self.on_expired is not None
        return await self.on_expired(expired)
