"""The terminal of `rallypoint run` shows the wait of the job: nodes, the last call, workers that are being stopped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from support.ports import free_port
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

# The worker ignores the first signal.
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start agents of a run, the first with a service in it; the file of an agent's name has its log."""
    port, begun = free_port(), []

    def run(name: str, *arguments: str, stderr: int | None = None) -> subprocess.Popen[str]:
        with open(tmp_path / name, "w") as log:
            command = [str(RALLYPOINT), "run", "--log-format", "human", "--insecure", "--nnodes", "2:3"]
            command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "job"]
            command += [*arguments, "--no-python", sys.executable, "-c", STUBBORN]
            environment = clean_environment()
            agent = subprocess.Popen(
                command, stderr=log if stderr is None else stderr, env=environment, text=True
            )
        agent.port = port  # type: ignore[attr-defined]
        begun.append(agent)
        return agent

    yield run
    for agent in begun:
        agent.kill()
        agent.wait(PATIENCE)


def until_logged(file: Path, pattern: str) -> None:
    """Wait for a line that has exactly this form, after its time."""
    whole = re.compile(rf"^\d\d:\d\d:\d\d {pattern}$", re.MULTILINE)
    try:
        wait_until(lambda: whole.search(file.read_text()) is not None, pattern)
    except AssertionError:
        raise AssertionError(f"{pattern} is not in:\n{file.read_text()}") from None


def test_each_wait_is_in_the_log(start: Start, tmp_path: Path) -> None:
    """It waits for nodes, then for the last call, then for workers; `status` uses the same words."""
    times = ["--node-id", "host-a", "--rdzv-conf", "join_timeout=600,last_call_timeout=3600"]
    first = start("a", *times)
    until_logged(tmp_path / "a", r"waiting for nodes: 1 of 2 here \(host-a\); gives up at \d\d:\d\d:\d\d")
    endpoint = ["--insecure", "--rdzv-endpoint", f"127.0.0.1:{first.port}", "job"]  # type: ignore[attr-defined]
    shown = rallypoint("status", *endpoint)
    assert re.search(r"^waiting for nodes: 1 of 2 here \(host-a\); gives up at ", shown.stdout, re.MULTILINE)
    run = json.loads(rallypoint("status", "--json", *endpoint).stdout)["run"]
    assert 0 < float(run["joinTimeLeft"].removesuffix("s")) <= 600

    start("b", "--node-id", "host-b", *times[2:])
    until_logged(tmp_path / "a", r"last call: starts in 3\d\d\d s at the latest, at once with 3")
    assert "last call: starts in" in rallypoint("status", *endpoint).stdout
    start("c", "--node-id", "host-c", *times[2:])
    until_logged(tmp_path / "a", "starting workers .*")


def test_a_stop_shows_the_remaining_ranks(tmp_path: Path) -> None:
    """It also shows how long the stop may take, and how to shorten it."""
    log = tmp_path / "log"
    with open(log, "w") as stderr:
        command = [str(RALLYPOINT), "run", "--standalone", "--log-format", "human", "--nproc-per-node", "2"]
        command += ["--shutdown-timeout", "3600", "--no-python", sys.executable, "-c", STUBBORN]
        agent = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, env=clean_environment(), text=True
        )
    with agent:
        assert agent.stdout is not None
        assert [agent.stdout.readline(), agent.stdout.readline()] == ["up\n"] * 2
        agent.send_signal(signal.SIGINT)
        line = (
            r"stopping workers \(got SIGINT\): up to {} s, Ctrl-C again kills them; still there: ranks 0, 1"
        )
        until_logged(log, line.format("3600"))
        until_logged(log, line.format(r"35\d\d"))
        agent.send_signal(signal.SIGINT)
        assert agent.wait(PATIENCE) == 130


def test_a_terminal_has_one_line_that_is_renewed(start: Start) -> None:
    """It is below the log: it is erased before a line of the log, and at the end."""
    keyboard, screen = os.openpty()
    times = ["--rdzv-conf", "last_call_timeout=3600"]
    start("a", "--node-id", "host-a", *times, stderr=screen)
    os.close(screen)
    seen = ""

    def shows(text: str) -> bool:
        nonlocal seen
        seen += os.read(keyboard, 4096).decode()
        return text in seen

    wait_until(lambda: shows("waiting for nodes: 1 of 2 here (host-a); gives up at"), "the wait")
    start("b", "--node-id", "host-b", *times)
    wait_until(lambda: shows("\x1b[2Klast call: starts in"), "the last call in the same line")
    assert "\n" not in seen[seen.index("waiting for nodes") : seen.index("last call")]
    os.close(keyboard)
