"""Agents that a test starts with `rallypoint run`; they are killed at its end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.cli_process import RALLYPOINT, clean_environment
from support.mortal import mortal
from support.waiting import PATIENCE

Start = Callable[..., subprocess.Popen[str]]
"""Starts an agent with flags, a script and its arguments."""


@contextmanager
def agents(folder: Path, *options: str, **environment: str) -> Iterator[Start]:
    """Start agents with a function; all have these options and run in this folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        command = mortal(str(RALLYPOINT), "run", *options, *map(str, arguments))
        started.append(
            subprocess.Popen(
                command, stderr=subprocess.PIPE, text=True, cwd=folder, env=clean_environment(**environment)
            )
        )
        return started[-1]

    try:
        yield start
    finally:
        for agent in started:
            agent.kill()
            _, said = agent.communicate()
            print(f"agent {agent.pid}, exit code {agent.returncode}:\n{said}")  # noqa: T201 (shown if the test fails)


@contextmanager
def waiting_agents(folder: Path, worker: str) -> Iterator[Start]:
    """Start agents with a function, from their flags; their workers write into the folder and wait for `finish`."""
    (folder / "worker.py").write_text(worker)
    with agents(folder, "--log-level", "warning") as start:
        yield lambda *flags: start(*flags, "worker.py", folder)


def ended(agent: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end of an agent; return its exit code and its stderr."""
    _, said = agent.communicate(timeout=2 * PATIENCE)
    return agent.returncode, said
