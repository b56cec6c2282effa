"""A service in a process of its own, on a journal that lasts, to be SIGKILLed and started again."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

_TESTS = Path(__file__).parents[1]


class Victim:
    """The process; its progress is what others count that it serves."""

    def __init__(self, program: ModuleType, folder: Path) -> None:
        """Set up.

        Args:
            program: Run with a journal and the endpoint to serve.
            folder: Where both are.
        """
        self.path = f"{folder}/service.sock"
        self._arguments = (str(program.__file__), f"{folder}/journal.sqlite", f"unix:{self.path}")
        self._process: asyncio.subprocess.Process | None = None
        self._done = 0
        self._progress = asyncio.Condition()

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *self._arguments,
            env=os.environ | {"PYTHONPATH": str(_TESTS)},
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def end(self) -> None:
        """SIGKILL it."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def count(self) -> None:
        """Note that one more thing is done."""
        async with self._progress:
            self._done += 1
            self._progress.notify_all()

    async def die_after(self, *counts: int) -> None:
        """Kill and restart it whenever so many things are done."""
        for count in counts:
            async with self._progress:
                await self._progress.wait_for(lambda count=count: self._done >= count)  # type: ignore[misc]
            await self.end()
            await self.start()


@asynccontextmanager
async def victim_of(program: ModuleType, folder: Path) -> AsyncIterator[Victim]:
    """One that has been started."""
    victim = Victim(program, folder)
    await victim.start()
    try:
        yield victim
    finally:
        await victim.end()
