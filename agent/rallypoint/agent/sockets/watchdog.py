"""State of the watchdog on this host; fails a job that requires one and has been without for too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from rallypoint.agent.core.core import NodeUnhealthy


@dataclass(frozen=True, slots=True)
class WatchdogChanged:
    """The watchdog of the workers here came (`trouble` is empty) or went (`trouble`: the reason, one line)."""

    trouble: str


class HostWatchdog:
    """State of the watchdog as this host sees it. Belongs to one event loop.

    Attributes:
        trouble: The reason why no watchdog guards the workers, one line; empty: one does, or it is not known yet.
    """

    def __init__(
        self, most: float | None, publish: Callable[[WatchdogChanged | NodeUnhealthy], None]
    ) -> None:
        """Set up; nothing is known yet.

        Args:
            most: Seconds that a job that requires a watchdog may run without, from the first report of its absence;
                None: it requires none.
            publish: Receives the events. NodeUnhealthy: a job that requires a watchdog has been without for too long.
        """
        self.trouble = ""
        self._most = most
        self._publish = publish
        self._there = asyncio.Event()
        self._giving_up: asyncio.TimerHandle | None = None

    def note(self, trouble: str) -> None:
        """Record a change; `trouble`: the reason why no watchdog guards the workers, "": one does."""
        changed = bool(trouble) != bool(self.trouble) or not (trouble or self._there.is_set())
        self.trouble = trouble
        if not trouble:
            self._there.set()
            self.close()
        else:
            self._there.clear()
            if self._most is not None and self._giving_up is None:
                loop = asyncio.get_running_loop()
                self._giving_up = loop.call_later(self._most, self._give_up, self._most)
        if changed:
            self._publish(WatchdogChanged(trouble))

    async def allows_workers(self) -> None:
        """Return when workers may be started: at once, unless the job requires a watchdog that is not there."""
        if self._most is not None:
            await self._there.wait()

    def close(self) -> None:
        """Cancel the pending timeout."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self, seconds: float) -> None:
        reason = f"no watchdog has guarded its workers for {seconds:g} s, and the job requires one"
        self._publish(NodeUnhealthy(f"{reason}: {self.trouble}"))
