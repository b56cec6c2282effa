"""The command line as a process: its output and its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rallypoint.rpc.runtime_folder import new_run_socket
from support.waiting import PATIENCE

RALLYPOINT = Path(sys.executable).with_name("rallypoint")
ABOUT_A_RUN = [
    ["status", "run-1"],
    ["events", "run-1"],
    ["events", "run-1", "--follow"],
    ["rounds", "run-1"],
    ["restart", "run-1"],
    ["evict", "run-1", "node-1"],
    ["close", "run-1"],
]


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without our settings, with which the tests themselves may have been started."""
    foreign = ("RALLYPOINT_", "PET_", "TORCHELASTIC_", "GRPC_", "COLUMNS", "LINES")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)} | more


def rallypoint(
    *arguments: str | Path,
    environment: Mapping[str, str] | None = None,
    program: Sequence[str] = (),
    timeout: float = PATIENCE,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; `program` takes the place of the installed one."""
    return subprocess.run(
        [*(program or [str(RALLYPOINT)]), *map(str, arguments)],
        capture_output=True,
        text=True,
        env=clean_environment(**environment or {}),
        timeout=timeout,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line of a refusal; fail if the command was not refused, or not in one line."""
    assert result.returncode == 2, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("Error: ")
    assert result.stdout == ""
    return lines[0].removeprefix("Error: ")


@contextmanager
def service(role: str, *arguments: str | Path) -> Iterator[str]:
    """A service in its own process; yields its address and stops it. A timer service leaves no file behind."""
    with new_run_socket(role, "service") as endpoint:
        process = subprocess.Popen(
            [
                str(RALLYPOINT),
                "serve",
                role,
                "--host",
                endpoint,
                "--log-format",
                "json",
                *map(str, arguments),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(RALLYPOINT_LEARNED="none"),
        )
        assert process.stderr is not None
        try:
            yield _ready(process.stderr, f"rallypoint.{role}.")["address"]
        finally:
            process.terminate()
            # Read to the end: a full pipe would keep the process from exiting.
            process.communicate(timeout=PATIENCE)


def _ready(lines: Iterator[str], package: str) -> dict[str, Any]:
    """Return the ready record of the role's own server; an agent contains another server."""
    seen = []
    for line in lines:
        seen.append(line)
        record: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "ready" and record["services"][0].startswith(package):
            return record
    raise AssertionError(f"it ended before it was ready: {''.join(seen)}")
