"""The server under attack: a process of its own, with limits that an attack reaches."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.cli_process import RALLYPOINT, clean_environment
from support.waiting import wait_until

MOST_RUNS = 40
MOST_NODES = 3
# Small, so that what is bounded is full long before an attack is half over, and grows no more.
LIMITS = {
    "--max-runs": MOST_RUNS,
    "--max-nodes-per-run": MOST_NODES,
    "--max-subscribers-per-run": 3,
    "--max-events-per-run": 200,
    "--max-event-bytes-per-run": 256 * 1024,
    "--run-ttl": 1,
    "--message-rate": 100,
    "--message-burst": 40,
    "--max-store-bytes-per-run": 256 * 1024,
    "--max-store-keys-per-run": 100,
    "--max-store-waiters-per-run": 4,
    "--max-states": 20,
    "--max-state-bytes": 1024 * 1024,
    "--max-state-watchers": 5,
}

_STOP_TIMEOUT = 30.0


@dataclass(slots=True)
class Target:
    """A server that runs, and what it says about itself once it has ended."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    ended: list[dict[str, Any]] = field(default_factory=list)

    def resident_bytes(self) -> int:
        """Memory that it has in RAM now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, status
        return int(found[1]) * 1024

    def cpu_seconds(self) -> float:
        """Processor time that it has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def records(self) -> list[dict[str, Any]]:
        """Its log so far; a line that is none of its records is one with an event of that text."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"event": line, "level": "no record"})
        return found

    def stop(self) -> None:
        """End it in good order."""
        self.process.terminate()
        self.process.wait(_STOP_TIMEOUT)


@contextmanager
def target(folder: Path, journal: str) -> Iterator[Target]:
    """A server for as long as the context lasts; its log stays in `folder`."""
    log = folder / "server.log"
    command = [
        str(RALLYPOINT),
        "serve",
        "rendezvous",
        "--port",
        "0",
        "--insecure",
        "--log-format",
        "json",
        "--journal",
        journal,
    ]
    command += [str(part) for flag in LIMITS.items() for part in flag]
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr, env=clean_environment(), cwd=folder)
    server = Target("", process, log)
    try:
        wait_until(lambda: _ready(server) or process.poll() is not None, "the server to be ready")
        assert process.poll() is None, log.read_text(encoding="utf-8")
        server.address = next(record["address"] for record in server.records() if record["event"] == "ready")
        yield server
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT)
        process.kill()
        process.wait()


def _ready(server: Target) -> bool:
    return any(record["event"] == "ready" for record in server.records())
