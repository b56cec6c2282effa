"""`rallypoint events --follow` in a process that can be stopped, as by a paused virtual machine."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cli.cli_process import RALLYPOINT, clean_environment
from support.mortal import mortal
from torture.mortal_server import PATIENCE
from torture.tormented_node import RUN

_LOOK = 0.02  # seconds between two reads of its output


class Follower:
    """The process. Its methods block."""

    def __init__(self, process: subprocess.Popen[bytes], printed: Path) -> None:
        """Wrap a process that prints into a file."""
        self._process = process
        self._printed = printed

    def stop(self) -> None:
        """Stop the process; data sent to it stays in the kernel."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it continue."""
        self._process.send_signal(signal.SIGCONT)

    def revisions(self) -> list[int]:
        """Return the revisions of the events that it has printed."""
        *lines, _unfinished = self._printed.read_text().split("\n")
        return [int(json.loads(line)["revision"]) for line in lines]

    def reach(self, revision: int) -> None:
        """Wait until it has printed an event.

        Raises:
            AssertionError: The event does not come.
        """
        end = time.monotonic() + PATIENCE
        while (self.revisions() or [0])[-1] < revision:
            assert self._process.poll() is None, "it ended"
            assert time.monotonic() < end, f"it has come to {self.revisions()[-1:]}, and not to {revision}"
            time.sleep(_LOOK)


@contextmanager
def following(endpoint: str, folder: Path) -> Iterator[Follower]:
    """Follow the events of the run, from the first one on."""
    printed = folder / "events"
    command = (
        str(RALLYPOINT),
        "events",
        RUN,
        "--follow",
        "--json",
        "--insecure",
        "--rdzv-endpoint",
        endpoint,
    )
    with printed.open("w") as file:
        process = subprocess.Popen(
            # While it is stopped its timeout runs on: it must be longer than any stop.
            mortal(*command, "--timeout", str(2 * PATIENCE)),
            stdout=file,
            env=clean_environment(),
        )
    try:
        yield Follower(process, printed)
    finally:
        process.kill()
        process.wait(PATIENCE)
