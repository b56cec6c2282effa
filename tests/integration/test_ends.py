"""All processes that an agent started end with it, in every way of ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from integration.scene import WORKER
from programs import Program
from support.processes import STUBBORN, all_there, fresh_marker, gone
from support.waiting import PATIENCE, until, wait_until

pytestmark = pytest.mark.integration


async def test_a_killed_agent_takes_everything_along(tmp_path: Path) -> None:
    """Within a second all of its workers, their children, and the daemons they made are dead; on a busy machine, within
    the time of fifty starts of an interpreter, which take less than a second on an idle one."""
    with fresh_marker() as marker:
        command = [
            str(RALLYPOINT),
            "run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "--log-dir",
            str(tmp_path),
        ]
        worker = ["--no-python", sys.executable, "-c", STUBBORN, marker, str(tmp_path)]
        agent = Program("agent", [*command, *worker], tmp_path, clean_environment())
        await until(lambda: all_there(tmp_path, 2), "all parts of the stubborn workers")
        start = _seconds_of_a_start()
        killed = await agent.kill(PATIENCE)
        start = max(start, _seconds_of_a_start())
        # Exact for the processes seen before the kill; one that keeps replacing itself by a fork may not be among them.
        seconds = killed.all_dead - killed.at
        print(f"killed → all {len(killed.pids)} dead {seconds:.3f} s, a start {start:.3f} s")  # noqa: T201
        assert seconds < max(1.0, 50 * start)
        await until(lambda: gone(marker), "the end of the rest")


def _seconds_of_a_start() -> float:
    """Measure the time that this machine now needs to run an empty Python program."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)
    return time.monotonic() - began


class Terminal:
    """A job at a terminal of its own, as a user starts it."""

    def __init__(self, folder: Path, marker: str, *arguments: str) -> None:
        """Start it; all its processes have the marker in their environment."""
        self._keyboard, screen = os.openpty()
        self._output = folder / "terminal.out"
        self._errors = folder / "terminal.err"
        with open(self._output, "wb") as stdout, open(self._errors, "wb") as stderr:
            self.process = subprocess.Popen(
                [
                    "setsid",
                    "--ctty",
                    str(RALLYPOINT),
                    "run",
                    "--standalone",
                    "--log-format",
                    "json",
                    "--log-dir",
                    str(folder),
                    *arguments,
                ],
                stdin=screen,
                stdout=stdout,
                stderr=stderr,
                env=clean_environment(TERMINAL=marker),
            )
        os.close(screen)

    def press_ctrl_c(self) -> None:
        """Let the terminal send SIGINT to its foreground processes."""
        os.write(self._keyboard, b"\x03")

    def wait_for(self, event: str, count: int = 1) -> None:
        """Wait until workers have printed an event `count` times."""
        wait_until(lambda: self._output.read_text().count(f'"event": "{event}"') == count, event)

    @property
    def log(self) -> list[dict[str, Any]]:
        """The agent's log."""
        return [json.loads(line) for line in self._errors.read_text().splitlines() if line.startswith("{")]

    @property
    def errors(self) -> list[str]:
        """The agent's reports for users."""
        return [record["report"] for record in self.log if record.get("report")]

    def close(self) -> None:
        """Kill the job if it runs, and close the terminal."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        os.close(self._keyboard)


@contextmanager
def terminal(folder: Path, *arguments: str) -> Iterator[Terminal]:
    """Run a job at a terminal; afterwards none of its processes is left."""
    with fresh_marker() as marker:
        shown = Terminal(folder, marker, *arguments)
        try:
            yield shown
        finally:
            shown.close()
        assert gone(marker)


def test_ctrl_c_interrupts_the_workers_and_kills_those_that_ignore_it(tmp_path: Path) -> None:
    """Both workers receive it; the agent waits for the shutdown timeout, logs the kill, and ends with 130."""
    order = [
        "--nproc-per-node",
        "2",
        "--shutdown-timeout",
        "1",
        str(WORKER),
        str(tmp_path),
        "ignore-interrupt",
        "1",
    ]
    with terminal(tmp_path, *order) as shown:
        shown.wait_for("started", 2)
        shown.press_ctrl_c()
        pressed = time.monotonic()
        assert shown.process.wait(PATIENCE) == 128 + signal.SIGINT
        assert time.monotonic() - pressed > 0.9
        shown.wait_for("interrupted")
        shown.wait_for("ignored")
        assert shown.errors == ["Error: left the run: got SIGINT"]
        (killed,) = (record for record in shown.log if "killed" in record["event"])
        assert killed["local_ranks"] == [1]


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path: Path) -> None:
    """The second one ends the shutdown timeout."""
    order = ["--shutdown-timeout", "300", str(WORKER), str(tmp_path), "ignore-interrupt"]
    with terminal(tmp_path, *order) as shown:
        shown.wait_for("started")
        shown.press_ctrl_c()
        shown.wait_for("ignored")
        time.sleep(0.3)  # sooner, it would count as the first one
        shown.press_ctrl_c()
        assert shown.process.wait(PATIENCE) == 128 + signal.SIGINT
