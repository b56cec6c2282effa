"""Whether a watchdog guards the workers of this host, and what becomes of a job that requires one where none does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class HostWatchdog:
    """State of the watchdog as this host sees it. Belongs to one event loop.

    Attributes:
        trouble: Why none does, one line for people; empty: one does, or it is not known yet.
    """

    def __init__(
        self,
        most: float | None,
        on_change: Callable[[bool, str], None],
        on_unfit: Callable[[str], None],
    ) -> None:
        """Set up; nothing is known yet.

        Args:
            most: Seconds for which a job that requires a watchdog does without, counted from the moment at which its
                absence was noted; None: it requires none.
            on_change: Called when it comes or goes, with whether one is there, and the trouble if not.
            on_unfit: Called with a sentence when a job that requires one has been without for too long.
        """
        self.trouble = ""
        self._most = most
        self._on_change = on_change
        self._on_unhealthy = on_unfit
        self._there = asyncio.Event()
        self._giving_up: asyncio.TimerHandle | None = None

    def note(self, trouble: str) -> None:
        """Take note of a change; `trouble`: why no watchdog guards the workers, "": one does."""
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
            self._on_change(not trouble, trouble)

    async def allows_workers(self) -> None:
        """Returns when workers may be started: at once, unless the job requires a watchdog that is not there."""
        if self._most is not None:
            await self._there.wait()

    def close(self) -> None:
        """Nothing is given up any more."""
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self, seconds: float) -> None:
        self._on_unhealthy(
            f"no watchdog has guarded its workers for {seconds:g} s, and the job requires one: {self.trouble}"
        )
