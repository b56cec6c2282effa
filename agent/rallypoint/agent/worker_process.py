"""A worker as the agent that has asked for it sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rallypoint.agent.spawn_protocol import SpawnError, WorkerExit, WorkerSpec


class WorkerProcess:
    """A worker that was asked for. Made by `Spawner.submit`.

    Attributes:
        number: the spawner's name for it, never used twice.
        spec: what was asked for.
        pid: its process id once started.
        started: resolves at exec, or raises SpawnError.
        exit: how it ended, once it has.
        cleared: resolves when it and all members of its process group are gone, or it never started.
    """

    def __init__(self, number: int, spec: WorkerSpec, on_exit: Callable[[WorkerExit], None]) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.spec = spec
        self.pid: int | None = None
        self.started: asyncio.Future[int] = loop.create_future()
        self.exit: WorkerExit | None = None
        self.cleared: asyncio.Future[None] = loop.create_future()
        self._on_exit = on_exit

    @property
    def alive(self) -> bool:
        """Whether it may still be running; true from the request on, before exec too."""
        return self.exit is None and not self.cleared.done()

    def has_started(self, pid: int) -> None:
        """The spawner says that it is past exec."""
        self.pid = pid
        if not self.started.done():
            self.started.set_result(pid)

    def has_failed(self, error: SpawnError) -> None:
        """The spawner says that it can't be started, or there is none any more."""
        if not self.started.done():
            self.started.set_exception(error)
            self.started.exception()  # seen, even if nobody waits any more
        self.is_cleared()

    def has_exited(self, how: WorkerExit) -> None:
        """The spawner has reaped it, or is known to have died with it."""
        self.exit = how
        self._on_exit(how)

    def is_cleared(self) -> None:
        """Nothing of its process group is left."""
        if not self.cleared.done():
            self.cleared.set_result(None)
