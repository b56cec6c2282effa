"""Agent and spawner are SIGKILLed over and over: no worker and none of its descendants is left."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from rallypoint.agent.spawner.spawner import descendants
from support.marks import slow
from support.mortal import mortal
from support.processes import all_there, fresh_marker, gone, living, stubborn
from support.waiting import PATIENCE, wait_until
from torture.length import FULL_LENGTH, ordinarily

pytestmark = pytest.mark.integration

REPEATS = ordinarily(2, in_full=67)  # of each way to kill
WORKERS = 2
LONGEST = 1.0  # most seconds that a process may live on; checked on a machine with no other load


def _named(root: int, name: str) -> int | None:
    """Return the descendant of a process that has this name."""
    for process in descendants(root):
        try:
            if Path(f"/proc/{process.pid}/comm").read_text().strip() == name:
                return process.pid
        except OSError:
            continue
    return None


def _wait_for_the_end(marker: str, besides: set[int]) -> float:
    """Wait until no process has the marker; return when the first check without one ended, in monotonic seconds."""
    empty_since: list[float] = []

    def nobody() -> bool:
        if set(living(marker)) - besides:
            empty_since.clear()
            return False
        empty_since.append(time.monotonic())
        # Further checks ensure that no process has hopped past the first; their time is not part of its life.
        return gone(marker, besides)

    wait_until(nobody, "the end of the tree")
    return empty_since[0]


def _kill_once(folder: Path, victims: tuple[str, ...]) -> float:
    """Start a job, kill, and wait for the end; return the seconds from the kill until no process was left."""
    folder.mkdir()
    temporary = folder / "tmp"
    temporary.mkdir()
    with fresh_marker() as marker:
        command = [str(RALLYPOINT), "run", "--standalone", "--log-dir", str(folder / "logs")]
        command += ["--nproc-per-node", str(WORKERS), "--log-level", "error", "--no-python", "--"]
        agent = subprocess.Popen(
            mortal(*command, *stubborn(marker, folder)),
            env=clean_environment(MARKER=marker, TMPDIR=str(temporary)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_until(lambda: all_there(folder, WORKERS), "all parts of the stubborn workers")
            guard = _named(agent.pid, "rallypoint-grd")
            spawner = _named(agent.pid, "rallypoint-spwn")
            assert guard is not None
            assert spawner is not None
            pids = {"agent": agent.pid, "spawner": spawner}
            killed = time.monotonic()
            for victim in victims:
                with suppress(ProcessLookupError):  # the guard may have been faster
                    os.kill(pids[victim], signal.SIGKILL)
            # An agent that lives, and its guard, exit by themselves, after their last output.
            took = _wait_for_the_end(marker, {agent.pid, guard}) - killed
            agent.wait(PATIENCE)
            wait_until(lambda: gone(marker), "the end of the guard")
            assert list(temporary.iterdir()) == []
            return took
        finally:
            agent.kill()
            agent.wait()


@pytest.mark.timeout(60 + REPEATS * 3 * PATIENCE)
@pytest.mark.parametrize(
    "victims", [slow(("agent",)), slow(("spawner",)), ("agent", "spawner")], ids="+".join
)
def test_no_process_outlives_agent_and_spawner(tmp_path: Path, victims: tuple[str, ...]) -> None:
    """Workers that ignore SIGTERM, fork, daemonise and hop all end, and the agent's temporary folders are removed."""
    took = sorted(_kill_once(tmp_path / str(number), victims) for number in range(REPEATS))
    print(  # noqa: T201
        f"{'+'.join(victims)} killed {len(took)} times: the last descendant gone after {statistics.median(took):.3f} s "
        f"(median), {', '.join(f'{each:.3f}' for each in took[:-4:-1])} s (the three longest)"
    )
    assert not FULL_LENGTH or took[-1] <= LONGEST
