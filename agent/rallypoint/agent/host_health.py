"""Looks into the health of the host: all checks at the same time, in bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from rallypoint.agent.evidence import in_background
from rallypoint.agent.health import HealthCheck, Surroundings
from rallypoint.agent.side_programs import ProgramTimeoutError, SidePrograms
from rallypoint.agent.spawn_protocol import SpawnError
from rallypoint.rpc.logs import get_logger

RECENT = 30.0
"""Seconds for which a host that was found healthy is taken to be so, where nothing went wrong on it since. A job that
grows by several hosts within them is not held up by each."""

_log = get_logger("rallypoint.agent")


class HostHealth:
    """The checks of one job."""

    def __init__(
        self,
        checks: Sequence[HealthCheck],
        surroundings: Surroundings,
        programs: SidePrograms,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up.

        Args:
            checks: What must hold.
            surroundings: What they need to know.
            programs: Runs those that are programs.
            timeout: Seconds that all of them may take together; one that takes longer has failed.
            clock: Monotonic, in seconds.
        """
        self._checks = checks
        self._surroundings = surroundings
        self._programs = programs
        self._timeout = timeout
        self._clock = clock
        self._found_healthy: float | None = None

    async def examine(self, anew: bool) -> str | None:
        """Why the host is not healthy, in one sentence; None if it is.

        Args:
            anew: Whether to look even if it was found healthy a moment ago.
        """
        began = self._clock()
        if not anew and self._found_healthy is not None and began < self._found_healthy + RECENT:
            return None
        reasons = await asyncio.gather(*(self._bounded(check) for check in self._checks))
        seconds = round(self._clock() - began, 3)
        bad = [
            f"{check.name}: {why}"
            for check, why in zip(self._checks, reasons, strict=True)
            if why is not None
        ]
        if bad:
            self._found_healthy = None
            return "; ".join(bad)
        _log.info("this host is healthy", checks=[check.name for check in self._checks], seconds=seconds)
        self._found_healthy = began
        return None

    async def _bounded(self, check: HealthCheck) -> str | None:
        try:
            if check.program is not None:
                return await self._run(check.program)
            assert check.look is not None, "a check is a program or a look"
            look = check.look
            async with asyncio.timeout(self._timeout):
                return await in_background(lambda: look(self._surroundings))
        except TimeoutError:
            return f"it did not end within {self._timeout:g} s"
        except (
            Exception
        ) as error:  # of a plug-in, or of a disk that is gone: nothing says that the host is healthy
            return f"it could not be looked at: {error!r}"

    async def _run(self, program: Sequence[str]) -> str | None:
        try:
            ended = await self._programs.run(program, self._timeout)
            if (
                ended.exit.inferred
            ):  # somebody killed the process that watched it, which says nothing of the host
                ended = await self._programs.run(program, self._timeout)
        except (ProgramTimeoutError, SpawnError) as error:
            return str(error)
        if ended.exit.succeeded:
            return None
        code, number = ended.exit.exit_code, ended.exit.signal
        how = f"ended by signal {number}" if number is not None else f"exit code {code}"
        return f"{ended.last_line} ({how})" if ended.last_line else how
