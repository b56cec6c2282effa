"""Programs that the agent runs beside the workers: health checks, and the maintenance command.

They have a spawner of their own. So no descendant outlives its program, even if it daemonises; no program outlives the
agent, even if that is killed; and the kill of a round's workers does not touch them.
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
"""Bytes that are kept of the beginning of a program's output, and of its end."""

# Seconds for a program's tree to die of SIGKILL; slower processes are left to the end of the job.
_TO_DIE = 2.0
_CHUNK = 64 * 1024
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]+")


class ProgramTimeoutError(Exception):
    """A program did not end in time, and was killed with all its descendants."""


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """Result of a program.

    Attributes:
        exit: its exit code or signal.
        first_line: of its output, without control characters.
        last_line: likewise; it usually has the error.
    """

    exit: WorkerExit
    first_line: str
    last_line: str


def missing(program: str, path: str | None) -> str | None:
    """Return the reason if a program can't be run, in one line; else None.

    Args:
        program: its name, looked up on `path` if there is no slash in it.
        path: PATH; None for the system's.
    """
    if shutil.which(program, path=path or os.defpath) is not None:
        return None
    if "/" not in program:
        return f"there is no program {program!r} in PATH"
    problem = "is not executable" if os.path.exists(program) else "does not exist"
    return f"{program!r} {problem}"


class HelperProcesses:
    """Runs such programs. The spawner is started with the first one."""

    def __init__(self, folder: Path, environment: Mapping[str, str], cwd: Path | None = None) -> None:
        """Set up.

        Args:
            folder: folder for named pipes with the programs' output.
            cwd: their working directory; None: the agent's.
        """
        self._folder = folder
        self._environment = environment
        self._cwd = cwd
        self._spawner: Spawner | None = None
        self._numbers = itertools.count()

    async def run(self, argv: Sequence[str], timeout: float | None = None) -> ProgramResult:
        """Run a program to its end, and then kill its remaining descendants.

        If this is cancelled, the program is killed as well.

        Args:
            timeout: seconds that it may take; None: no limit.

        Raises:
            SpawnError: it can't be started; one line.
            ProgramTimeoutError: it took longer.
            OSError: the pipe for its output can't be made.
        """
        output = _OutputPipe(self._folder / f"side.{next(self._numbers)}")
        try:
            return await self._run(argv, timeout, output)
        finally:
            output.close()

    async def close(self) -> None:
        """Kill the running programs; none is left when this returns."""
        if self._spawner is not None:
            await self._spawner.close(_TO_DIE)

    async def _run(self, argv: Sequence[str], timeout: float | None, output: _OutputPipe) -> ProgramResult:
        if self._spawner is None or self._spawner.dead:
            self._spawner = Spawner.start()
        spawner = self._spawner
        ended: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()
        spec = WorkerSpec(0, argv, self._environment, cwd=self._cwd, stdout=output.path, stderr=output.path)
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
        return ProgramResult(exit_, output.first_line, output.last_line)


class _OutputPipe:
    """A program's output through a named pipe: a program that writes for weeks would fill the disk with a file."""

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
