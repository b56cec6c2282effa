"""All checks of a host run at the same time and have a time limit; without a result the host is unhealthy."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.agent.health.checks import CheckContext, HealthCheck
from rallypoint.agent.health.helper_processes import HelperProcesses
from rallypoint.agent.health.monitor import RECENT, HostHealth
from support.waiting import PATIENCE


class Host:
    """A host with checks, and a clock of the test."""

    def __init__(self, programs: HelperProcesses) -> None:
        self.now = 1000.0
        self.looks = 0
        self.why: str | None = None
        self._programs = programs

    def health(self, *checks: HealthCheck, timeout: float = PATIENCE) -> HostHealth:
        """Return its health; by default there is one check, which returns `why`."""
        checks = checks or (HealthCheck("own", check=self.look),)
        return HostHealth(checks, CheckContext(), self._programs, timeout, lambda: self.now)

    def look(self, _: CheckContext) -> str | None:
        """Run its own check."""
        self.looks += 1
        return self.why


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A host with helper processes that end after the test."""
    programs = HelperProcesses(tmp_path, {"PATH": os.environ["PATH"]})
    yield Host(programs)
    await programs.close()


async def test_a_recent_result_holds_unless_a_fresh_one_is_requested(host: Host) -> None:
    """This applies only to a good result."""
    health = host.health()
    assert await health.examine(fresh=False) is None
    host.now += RECENT - 1
    assert await health.examine(fresh=False) is None
    assert host.looks == 1
    assert await health.examine(fresh=True) is None
    assert host.looks == 2
    host.now += RECENT + 1
    host.why = "smoke"
    assert await health.examine(fresh=False) == "own: smoke"
    assert await health.examine(fresh=False) == "own: smoke"
    assert host.looks == 4


async def test_all_checks_run_at_the_same_time(host: Host) -> None:
    """Each check waits for the other; all problems are reported."""
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def meet(_: CheckContext) -> str | None:
        meeting.wait()
        return "bad"

    checks = [HealthCheck("a", check=meet), HealthCheck("b", check=meet), HealthCheck("c", program=("true",))]
    assert await host.health(*checks).examine(fresh=True) == "a: bad; b: bad"


async def test_a_hanging_check_is_not_healthy_and_has_a_time_limit(host: Host) -> None:
    """For example, a check of a disk that is gone hangs."""
    stop = threading.Event()
    hangs = HealthCheck("nfs", check=lambda _: str(stop.wait()))
    try:
        assert await host.health(hangs, timeout=0.1).examine(fresh=True) == "nfs: it did not end within 0.1 s"
    finally:
        stop.set()


async def test_a_check_that_raises_is_not_healthy(host: Host) -> None:
    """The result is unknown."""

    def fail(_: CheckContext) -> str | None:
        raise OSError(5, "Input/output error")

    told = await host.health(HealthCheck("disk", check=fail)).examine(fresh=True)
    assert told == "disk: the check could not be run: OSError(5, 'Input/output error')"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", None),
        ("echo looking; echo fan 3 stands still; exit 4", "fan 3 stands still (exit code 4)"),
        ("exit 4", "exit code 4"),
        ("kill -9 $$", "ended by signal 9"),
        ("sleep 600", "it did not end within 1 s"),
    ],
)
async def test_a_command_reports_by_its_exit_code_and_its_last_line(
    host: Host, script: str, why: str | None
) -> None:
    """One that takes too long is killed."""
    check = HealthCheck("command:look", program=("sh", "-c", script))
    timeout = 1.0 if "sleep" in script else PATIENCE
    told = await host.health(check, timeout=timeout).examine(fresh=True)
    assert told == (f"command:look: {why}" if why else None)
