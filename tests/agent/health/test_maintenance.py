"""A program that watches for maintenance is started again until it announces one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rallypoint.agent.health import monitor
from rallypoint.agent.health.helper_processes import HelperProcesses
from rallypoint.agent.health.monitor import LONGEST_PAUSE, await_maintenance
from support.log_events import log_events


@pytest.fixture
async def programs(tmp_path: Path) -> AsyncIterator[HelperProcesses]:
    """Helper processes in a folder of their own."""
    programs = HelperProcesses(tmp_path, {"PATH": os.environ["PATH"]})
    yield programs
    await programs.close()


async def test_pauses_grow_until_it_runs_for_a_while(
    programs: HelperProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unavailable metadata service gets few requests; after a longer run the next start comes soon."""
    monkeypatch.setattr(monitor, "FIRST_PAUSE", 0.01)
    times = iter([0.0, 0.1, 1.0, 1.1, 2.0, 2.0 + LONGEST_PAUSE, 70.0])
    command = ["sh", "-c", f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) = 4 ]"]
    await await_maintenance(command, programs, clock=lambda: next(times))
    assert [event.fields["pause"] for event in log_events(caplog.records)] == [0.01, 0.02, 0.01]


async def test_its_first_line_is_the_reason(programs: HelperProcesses) -> None:
    """This applies once it ends with exit code 0."""
    command = ["sh", "-c", "echo TERMINATE at 10:00; echo more"]
    assert await await_maintenance(command, programs) == "TERMINATE at 10:00"
    assert await await_maintenance(["true"], programs) == "announced by the maintenance command"


async def test_however_else_it_ends_it_is_started_again(
    programs: HelperProcesses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An unavailable service announces nothing; the log has the reason."""
    monkeypatch.setattr(monitor, "FIRST_PAUSE", 0.01)
    script = tmp_path / "watch"
    script.write_text(f"""#!/bin/sh
        echo x >> {tmp_path}/starts
        [ $(wc -l < {tmp_path}/starts) = 3 ] && {{ echo the third; exit 0; }}
        echo "no route to host" >&2
        exit 7
    """)
    script.chmod(0o755)
    assert await await_maintenance([str(script)], programs) == "the third"
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2
    assert "no route to host (exit code 7)" in warnings[0]
