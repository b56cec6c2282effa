"""What the agent minds about its host, beside the workers: its health, its maintenance, and what is stuck on it.

What a job does not ask for costs it nothing: it is not even loaded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rallypoint.agent import core
from rallypoint.agent.config import JobConfig
from rallypoint.rpc.endpoint import SettingError

if TYPE_CHECKING:
    from rallypoint.agent.host_health import HostHealth
    from rallypoint.agent.side_programs import SidePrograms

_STUCK_VARIABLE = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"
# Seconds; the rendezvous service's, where a run has no other.
_CONFIRM_TIMEOUT = 60.0


class HostCare:
    """For one job."""

    def __init__(
        self, config: JobConfig, folder: Path, log_dir: Path, pids: Callable[[], Mapping[int, int]]
    ) -> None:
        """Set up. Nothing is started; only a GPU's driver may be asked whether it is there.

        Args:
            config: The job.
            folder: For temporary files.
            log_dir: Of the job's logs.
            pids: Process ids of the workers that run, by rank.

        Raises:
            SettingError: A check or a program that was asked for can't be had on this host; one line.
        """
        self._maintenance: Callable[[], Awaitable[str]] | None = None
        self._stuck: Callable[[], Awaitable[str]] | None = None
        self._health: HostHealth | None = None
        self._programs: SidePrograms | None = None
        if config.health_checks or config.maintenance_command is not None:
            self._programs = _side_programs(config, folder)
            if config.health_checks:
                self._health = _host_health(config, log_dir, self._programs)
            if config.maintenance_command is not None:
                self._maintenance = _maintenance(config, config.maintenance_command, self._programs)
        if config.environment.get(_STUCK_VARIABLE):
            self._stuck = _stuck(config, pids)

    def mind(
        self,
        begin: Callable[[Coroutine[Any, Any, None]], object],
        drain: Callable[[str], None],
        on_unfit: Callable[[str], None],
    ) -> None:
        """Watch the host from now on.

        Args:
            begin: Runs work in the background.
            drain: Called with the reason once the host is announced to go down.
            on_unfit: Called with a sentence once a worker is stuck in the kernel.
        """
        if self._maintenance is not None:
            begin(_tell(drain, self._maintenance()))
        if self._stuck is not None:
            begin(_tell(on_unfit, self._stuck()))

    async def examine(
        self, anew: bool, tell: Callable[[core.Event], None], on_unfit: Callable[[str], None]
    ) -> None:
        """Look into the host's health.

        Args:
            anew: Whether to look even if it was found healthy a moment ago.
            tell: Called if it is healthy.
            on_unfit: Called with the reason if it is not.
        """
        why = await self._health.examine(anew) if self._health is not None else None
        if why is not None:
            on_unfit(why)
        else:
            tell(core.Examined())

    async def close(self) -> None:
        """No program of the host's care is left when this returns."""
        if self._programs is not None:
            await self._programs.close()


async def _tell(whom: Callable[[str], None], what: Awaitable[str]) -> None:
    whom(await what)


def _side_programs(config: JobConfig, folder: Path) -> SidePrograms:
    from rallypoint.agent.side_programs import SidePrograms  # noqa: PLC0415

    return SidePrograms(folder, config.environment, config.working_directory)


def _host_health(config: JobConfig, log_dir: Path, programs: SidePrograms) -> HostHealth:
    from rallypoint.agent.health import Surroundings, parse_health_check  # noqa: PLC0415
    from rallypoint.agent.host_health import HostHealth  # noqa: PLC0415

    patience = config.settings.confirm_timeout.ToNanoseconds() / 1e9 or _CONFIRM_TIMEOUT
    if config.health_timeout >= patience:
        raise SettingError(
            f"a health timeout of {config.health_timeout:g} s is not below the run's confirm_timeout of "
            f"{patience:g} s: this host would be taken for lost; give --rdzv-conf confirm_timeout=… on all hosts"
        )
    environment = config.environment
    surroundings = Surroundings(
        (log_dir, Path(tempfile.gettempdir())), environment.get("CUDA_VISIBLE_DEVICES")
    )
    checks = [parse_health_check(text, environment.get("PATH")) for text in config.health_checks]
    return HostHealth(checks, surroundings, programs, config.health_timeout)


def _maintenance(
    config: JobConfig, command: tuple[str, ...], programs: SidePrograms
) -> Callable[[], Awaitable[str]]:
    from rallypoint.agent.maintenance import await_maintenance  # noqa: PLC0415
    from rallypoint.agent.side_programs import missing  # noqa: PLC0415

    if (why := missing(command[0], config.environment.get("PATH"))) is not None:
        raise SettingError(f"the maintenance command can't be run: {why}")
    return lambda: await_maintenance(command, programs)


def _stuck(config: JobConfig, pids: Callable[[], Mapping[int, int]]) -> Callable[[], Awaitable[str]] | None:
    from rallypoint.agent.uninterruptible import await_stuck, uninterruptible_timeout  # noqa: PLC0415

    timeout = uninterruptible_timeout(config.environment)
    return (lambda: await_stuck(pids, timeout)) if timeout > 0 else None
