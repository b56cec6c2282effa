"""Monitor of the agent's host: its health, its maintenance, and workers that are stuck in its kernel."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rallypoint.agent.config.job import JobConfig
from rallypoint.agent.core import core
from rallypoint.agent.hangs.diagnostics import in_background
from rallypoint.agent.hangs.uninterruptible import await_stuck, uninterruptible_timeout
from rallypoint.agent.health.checks import CheckContext, HealthCheck, parse_health_check
from rallypoint.agent.health.helper_processes import (
    HelperProcesses,
    ProgramResult,
    ProgramTimeoutError,
    missing,
)
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.logs import get_logger

# Seconds; the rendezvous service's default.
_CONFIRM_TIMEOUT = 60.0


@dataclass(frozen=True, slots=True)
class MaintenanceAnnounced:
    """Maintenance of the host was announced; `reason`: for people."""

    reason: str


HostEvent: TypeAlias = MaintenanceAnnounced | core.HealthChecked | core.NodeUnhealthy


class HostMonitor:
    """Monitor of the host for one job."""

    def __init__(
        self,
        config: JobConfig,
        folder: Path,
        log_dir: Path,
        pids: Callable[[], Mapping[int, int]],
        publish: Callable[[HostEvent], None],
    ) -> None:
        """Set up; start nothing.

        Args:
            pids: Process ids of the running workers, by rank.
            publish: Receives the events. NodeUnhealthy: a worker is stuck in the kernel, or a health check failed.

        Raises:
            SettingError: This host can't run a configured check or program; one line.
        """
        self._publish = publish
        self._maintenance: Callable[[], Awaitable[str]] | None = None
        self._stuck: Callable[[], Awaitable[str]] | None = None
        self._health: HostHealth | None = None
        self._programs: HelperProcesses | None = None
        if config.health_checks or config.maintenance_command is not None:
            self._programs = HelperProcesses(folder, config.environment, config.working_directory)
            if config.health_checks:
                self._health = _host_health(config, log_dir, self._programs)
            if config.maintenance_command is not None:
                self._maintenance = _maintenance(config, config.maintenance_command, self._programs)
        if (timeout := uninterruptible_timeout(config.environment)) > 0:
            self._stuck = lambda: await_stuck(pids, timeout)

    def start(self, begin: Callable[[Coroutine[Any, Any, None]], object]) -> None:
        """Start to watch the host; `begin` runs a task in the background."""
        if self._maintenance is not None:
            begin(self._await(MaintenanceAnnounced, self._maintenance()))
        if self._stuck is not None:
            begin(self._await(core.NodeUnhealthy, self._stuck()))

    async def examine(self, fresh: bool) -> None:
        """Run the health checks; `fresh`: even if they passed a moment ago."""
        why = await self._health.examine(fresh) if self._health is not None else None
        self._publish(core.NodeUnhealthy(why) if why is not None else core.HealthChecked())

    async def close(self) -> None:
        """Kill the running programs; none is left when this returns."""
        if self._programs is not None:
            await self._programs.close()

    async def _await(self, event: Callable[[str], HostEvent], reason: Awaitable[str]) -> None:
        self._publish(event(await reason))


def _host_health(config: JobConfig, log_dir: Path, programs: HelperProcesses) -> HostHealth:
    confirm_timeout = to_seconds(config.settings.confirm_timeout) or _CONFIRM_TIMEOUT
    if config.health_timeout >= confirm_timeout:
        raise SettingError(
            f"a health timeout of {config.health_timeout:g} s is not below the run's confirm_timeout of "
            f"{confirm_timeout:g} s: this host would count as lost; give --rdzv-conf confirm_timeout=… on all hosts"
        )
    environment = config.environment
    context = CheckContext((log_dir, Path(tempfile.gettempdir())), environment.get("CUDA_VISIBLE_DEVICES"))
    checks = [parse_health_check(text, environment.get("PATH")) for text in config.health_checks]
    return HostHealth(checks, context, programs, config.health_timeout)


def _maintenance(
    config: JobConfig, command: tuple[str, ...], programs: HelperProcesses
) -> Callable[[], Awaitable[str]]:
    if (why := missing(command[0], config.environment.get("PATH"))) is not None:
        raise SettingError(f"the maintenance command can't be run: {why}")
    return lambda: await_maintenance(command, programs)


# ---- Health checks: all at the same time, in bounded time.


RECENT = 30.0
"""Seconds for which a passed check is valid, if nothing went wrong on the host since. So a job that grows by several
hosts within that time is delayed only once."""

_log = get_logger("rallypoint.agent")


class HostHealth:
    """The checks of one job."""

    def __init__(
        self,
        checks: Sequence[HealthCheck],
        context: CheckContext,
        programs: HelperProcesses,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up.

        Args:
            context: Their input from the job.
            timeout: Limit in seconds for all of them together; a check that takes longer has failed.
            clock: Monotonic, in seconds.
        """
        self._checks = checks
        self._context = context
        self._programs = programs
        self._timeout = timeout
        self._clock = clock
        self._found_healthy: float | None = None

    async def examine(self, fresh: bool) -> str | None:
        """Run the checks; return the reasons of those that failed in one sentence, None if all passed.

        Args:
            fresh: Run them even if they passed a moment ago.
        """
        began = self._clock()
        if not fresh and self._found_healthy is not None and began < self._found_healthy + RECENT:
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
            assert check.check is not None, "a check is a program or a function"
            look = check.check
            async with asyncio.timeout(self._timeout):
                return await in_background(lambda: look(self._context))
        except TimeoutError:
            return f"it did not end within {self._timeout:g} s"
        except Exception as error:  # of a plug-in, or of a failed disk: the check has not passed
            return f"the check could not be run: {error!r}"

    async def _run(self, program: Sequence[str]) -> str | None:
        try:
            ended = await self._programs.run(program, self._timeout)
            if ended.exit.inferred:  # the spawner was killed, which does not mean that the host is unhealthy
                ended = await self._programs.run(program, self._timeout)
        except (ProgramTimeoutError, SpawnError) as error:
            return str(error)
        return None if ended.exit.succeeded else _problem(ended)


def _problem(ended: ProgramResult) -> str:
    """Describe the end of a program that failed: its last line of output, and its exit code or signal."""
    code, number = ended.exit.exit_code, ended.exit.signal
    how = f"ended by signal {number}" if number is not None else f"exit code {code}"
    return f"{ended.last_line} ({how})" if ended.last_line else how


# ---- The maintenance command: a user's program that reports announced maintenance.


FIRST_PAUSE = 1.0
"""Seconds before a program that failed is started again; doubled each time."""

LONGEST_PAUSE = 60.0
"""Seconds; and a program that ran for so long before it failed is started again after FIRST_PAUSE. Clouds announce
maintenance at least two minutes ahead."""


async def await_maintenance(
    program: Sequence[str], programs: HelperProcesses, clock: Callable[[], float] = time.monotonic
) -> str:
    """Return the reason once maintenance of the host is announced.

    Args:
        program: Program and arguments. It ends with exit code 0 when maintenance is announced, and its first line of
            output is the reason. After any other exit it is started again, after a pause.
        clock: Monotonic, in seconds.
    """
    # Not drawn: each host runs a program of its own.
    backoff = Backoff(lambda: 1.0, first=FIRST_PAUSE, longest=LONGEST_PAUSE)
    while True:
        began = clock()
        try:
            ended = await programs.run(program)
        except (SpawnError, OSError) as error:
            why = str(error)
        else:
            if ended.exit.succeeded:
                return ended.first_line or "announced by the maintenance command"
            why = _problem(ended)
        if clock() - began >= LONGEST_PAUSE:
            backoff.reset()
        pause = backoff.next()
        _log.warning("the maintenance command failed; it is started again", reason=why, pause=pause)
        await asyncio.sleep(pause)
