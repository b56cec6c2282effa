"""Helper processes: their output is read, their time is limited, and all their processes end with them."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest

from rallypoint.agent.health.helper_processes import MOST_KEPT, HelperProcesses, ProgramTimeoutError, missing
from rallypoint.agent.spawner.protocol import SpawnError
from support.processes import fresh_marker, gone, living
from support.waiting import PATIENCE, until


@pytest.fixture
async def programs(tmp_path: Path) -> AsyncIterator[HelperProcesses]:
    """Helper processes; none is left afterwards."""
    with fresh_marker() as marker:
        programs = HelperProcesses(tmp_path, {"PATH": os.environ["PATH"], "MARKER": marker})
        yield programs
        await programs.close()
        assert gone(marker)
        assert os.listdir(tmp_path) == []


async def test_exit_code_and_output_are_returned(programs: HelperProcesses) -> None:
    """Both streams are read, without characters that would move the cursor of a terminal."""
    ended = await programs.run(["sh", "-c", "echo first; echo ' \033[31mlast\tword ' >&2; exit 3"], PATIENCE)
    assert (ended.exit.exit_code, ended.first_line, ended.last_line) == (3, "first", "[31mlast word")


async def test_a_program_without_output_has_no_lines(programs: HelperProcesses) -> None:
    """It does not get the output of an earlier one."""
    ended = await programs.run(["true"], PATIENCE)
    assert (ended.exit.succeeded, ended.first_line, ended.last_line) == (True, "", "")


async def test_a_flood_is_forgotten_but_for_its_ends(programs: HelperProcesses) -> None:
    """A program may print for weeks."""
    script = f"print('begin'); print('x' * {100 * MOST_KEPT}); print('end')"
    ended = await programs.run([sys.executable, "-c", script], PATIENCE)
    assert (ended.first_line, ended.last_line) == ("begin", "end")


async def test_one_that_takes_too_long_is_killed_with_its_daemons(
    programs: HelperProcesses, tmp_path: Path
) -> None:
    """All its processes are killed, also those in a session of their own."""
    marker = programs._environment["MARKER"]
    script = f"setsid sh -c 'sleep 600' {marker} & trap '' TERM; sleep 600; true {marker}"
    began = time.monotonic()
    with pytest.raises(ProgramTimeoutError, match=r"it did not end within 0\.5 s"):
        await programs.run(["sh", "-c", script, marker], 0.5)
    assert time.monotonic() - began >= 0.5
    assert gone(marker)


async def test_processes_left_by_a_program_are_killed(programs: HelperProcesses) -> None:
    """The processes of many checks would add up."""
    marker = programs._environment["MARKER"]
    await programs.run(["sh", "-c", f"setsid sh -c 'sleep 600' {marker} & exit 0", marker], PATIENCE)
    assert gone(marker)


async def test_a_wait_that_is_cancelled_ends_the_program(programs: HelperProcesses) -> None:
    """The job has ended."""
    marker = programs._environment["MARKER"]
    waiting = asyncio.create_task(programs.run(["sh", "-c", "sleep 600; true", marker]))
    await until(lambda: bool(living(marker)), "the program")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert gone(marker)


async def test_one_that_does_not_exist_can_not_be_started(programs: HelperProcesses) -> None:
    """The reason is one line; the next program can be started."""
    with pytest.raises(SpawnError, match="there is no program '/none'"):
        await programs.run(["/none"], PATIENCE)
    assert (await programs.run(["true"], PATIENCE)).exit.succeeded


async def test_a_spawner_that_was_killed_is_replaced(programs: HelperProcesses) -> None:
    """The program that was running is reported as killed with it."""
    waiting = asyncio.create_task(programs.run(["sleep", "60"]))
    await until(lambda: programs._spawner is not None and bool(programs._spawner.pid), "the spawner")
    assert programs._spawner is not None
    assert programs._spawner.pid is not None
    os.kill(programs._spawner.pid, signal.SIGKILL)
    with suppress(SpawnError):  # the spawner was killed before the program began
        assert (await asyncio.wait_for(waiting, PATIENCE)).exit.inferred
    assert (await programs.run(["true"], PATIENCE)).exit.succeeded


def test_an_unusable_program_is_found_before_its_start(tmp_path: Path) -> None:
    """Its name, its path and its permissions are checked."""
    program = tmp_path / "check"
    program.touch()
    assert missing("sh", os.environ["PATH"]) is None
    assert missing("no-such-check", os.environ["PATH"]) == "there is no program 'no-such-check' in PATH"
    assert missing(str(program), None) == f"'{program}' is not executable"
    assert missing("/none", None) == "'/none' does not exist"
