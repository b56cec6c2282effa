"""The server under attack: a separate process, with limits that an attack reaches."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cli.cli_process import RALLYPOINT, clean_environment
from hostile.kinds import Kind
from support.waiting import wait_until

_STOP_TIMEOUT = 30.0


@dataclass(slots=True)
class Target:
    """A running server, and its log records after its end."""

    address: str
    process: subprocess.Popen[bytes]
    log: Path
    ended: list[dict[str, Any]] = field(default_factory=list)

    def resident_bytes(self) -> int:
        """Return its memory in RAM, bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found is not None, status
        return int(found[1]) * 1024

    def cpu_seconds(self) -> float:
        """Return the processor time that it has used, seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def records(self) -> list[dict[str, Any]]:
        """Return its log records so far; a line that is no record becomes one with an event of that text."""
        found = []
        for line in self.log.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                found.append({"event": line, "level": "no record"})
        return found

    def stop(self) -> None:
        """Stop it by SIGTERM, and wait."""
        self.process.terminate()
        self.process.wait(_STOP_TIMEOUT)


@contextmanager
def target(folder: Path, kind: Kind, journal: str = "") -> Iterator[Target]:
    """A server for as long as the context lasts; its log stays in `folder`, and so do all files of its jobs.

    `journal`: replaces the journal in the kind's flags, for a rendezvous service.
    """
    log = folder / "server.log"
    flags = {"--port": 0, "--log-format": "json", **kind.flags}
    if journal:
        flags["--journal"] = journal
    command = [str(RALLYPOINT), "serve", kind.name, "--insecure"]
    command += [str(part) for flag in flags.items() for part in flag]
    with TemporaryDirectory(prefix="hostile-") as temporary, log.open("wb") as stderr:
        # It needs a short path: agents create sockets in it.
        environment = clean_environment(TMPDIR=temporary)
        process = subprocess.Popen(command, stderr=stderr, env=environment, cwd=folder)
        server = Target("", process, log)
        try:
            wait_until(lambda: bool(_address(server, kind)) or process.poll() is not None, "the server")
            assert process.poll() is None, log.read_text(encoding="utf-8")
            server.address = _address(server, kind)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_TIMEOUT)
            process.kill()
            process.wait()


def _address(server: Target, kind: Kind) -> str:
    """Return its address; empty: not serving yet. An agent contains its own servers."""
    for record in server.records():
        if record["event"] == "ready" and record["services"][0] in kind.services:
            return str(record["address"])
    return ""
