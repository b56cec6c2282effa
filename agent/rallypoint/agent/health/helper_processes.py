"""Programs that the agent runs beside the workers: checks of the host's health, the watch for its maintenance.

They are below a spawner of their own. So nothing that a program started outlives it, however it daemonises; none of
them outlives the agent, even if that is killed; and no sweep that ends a round's workers touches them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import WorkerExit, WorkerSpec

MOST_KEPT = 4096
"""Bytes of the beginning, and as many of the end, of what a program says; the rest is forgotten."""

_TO_DIE = (
    2.0  # seconds for a program's tree to die of SIGKILL; what takes longer is left to the end of the job
)
_CHUNK = 64 * 1024
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]+")


class ProgramTimeoutError(Exception):
    """A program did not end in time, and was killed with all it has started."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended.

    Attributes:
        exit: its exit code or signal.
        first_line: of its output, without control characters.
        last_line: the same; what it says last, as a rule, is what went wrong.
    """

    exit: WorkerExit
    first_line: str
    last_line: str


def missing(program: str, path: str | None) -> str | None:
    """Why a program can't be run, in one line; None if it can be.

    Args:
        program: its name, looked up on `path` if there is no slash in it.
        path: PATH; None for the system's.
    """
    if shutil.which(program, path=path or os.defpath) is not None:
        return None
    if "/" not in program:
        return f"there is no program {program!r} in PATH"
    what = "is not executable" if os.path.exists(program) else "does not exist"
    return f"{program!r} {what}"


class HelperProcesses:
    """Runs them. No process is made before the first."""

    def __init__(self, folder: Path, environment: Mapping[str, str], cwd: Path | None = None) -> None:
        """Set up.

        Args:
            folder: for named pipes through which programs speak.
            environment: what they inherit.
            cwd: their working directory; None: the agent's.
        """
        self._folder = folder
        self._environment = environment
        self._cwd = cwd
        self._spawner: Spawner | None = None
        self._numbers = itertools.count()

    async def run(self, argv: Sequence[str], timeout: float | None = None) -> ProgramResult:
        """Run a program to its end, and then whatever it left behind.

        Cancelled, the program is killed as well.

        Args:
            argv: program and arguments.
            timeout: seconds that it may take; None: for ever.

        Raises:
            SpawnError: it can't be started; one line.
            ProgramTimeoutError: it took longer.
            OSError: there is no place for a pipe.
        """
        said = _OutputPipe(self._folder / f"side.{next(self._numbers)}")
        try:
            return await self._run(argv, timeout, said)
        finally:
            said.close()

    async def close(self) -> None:
        """Kill those that run; none is left when this returns."""
        if self._spawner is not None:
            await self._spawner.close(_TO_DIE)

    async def _run(self, argv: Sequence[str], timeout: float | None, said: _OutputPipe) -> ProgramResult:
        if self._spawner is None or self._spawner.dead:
            self._spawner = Spawner.start()
        spawner = self._spawner
        ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        spec = WorkerSpec(0, argv, self._environment, cwd=self._cwd, stdout=said.path, stderr=said.path)
        (program,) = spawner.submit([spec], lambda how: None if ended.done() else ended.set_result(how))
        try:
            async with asyncio.timeout(timeout):
                try:
                    await spawner.wait_started([program])
                    exit_ = await ended
                finally:
                    await asyncio.shield(spawner.kill(program, _TO_DIE))
        except TimeoutError:
            raise ProgramTimeoutError(f"it did not end within {timeout:g} s") from None
        return ProgramResult(exit_, said.first_line, said.last_line)


class _OutputPipe:
    """What a program says, through a named pipe: a file would fill the disk of one that speaks for weeks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path, 0o600)
        self._descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self._beginning = b""
        self._end = b""

    @property
    def first_line(self) -> str:
        self._read()
        return _words(next(iter(self._beginning.strip().splitlines()), b""))

    @property
    def last_line(self) -> str:
        self._read()
        return _words(next(reversed(self._end.strip().splitlines()), b""))

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            data = os.read(self._descriptor, _CHUNK)
            self._beginning = (self._beginning + data)[:MOST_KEPT]
            self._end = (self._end + data)[-MOST_KEPT:]


def _words(line: bytes) -> str:
    return _CONTROLS.sub(" ", line.decode("utf-8", "replace")).strip()[:500]
