"""A process on a host of the network, with its log, that a test can kill, pause and start again."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cli.cli_process import clean_environment
from ha.network import Network
from ha.waiting import PATIENCE
from support.mortal import mortal


class ProcessError(AssertionError):
    """A process ended by itself, or does not end; the message has the end of its log."""


class HostProcess:
    """The successive processes of one service. Its methods that wait let the event loop run.

    Attributes:
        name: The name of the service.
        paused: True if `pause` has stopped the process.
        starts: Number of processes so far.
    """

    def __init__(self, name: str, network: Network, folder: Path, host: str = "") -> None:
        """Start nothing yet; logs go to `folder`. `host`: its host; by default the one with its own name."""
        self.name = name
        self.paused = False
        self.starts = 0
        self._network = network
        self._host = host or name
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """True if a process exists, also if it is paused."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The pid of the present process, or the last one."""
        assert self._process is not None, f"{self.name} was never started"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """The log of the present process, or the last one."""
        return self._folder / f"{self.name}-{self.starts}.log"

    def log(self) -> str:
        """Return the output of the present process, or the last one."""
        return self.log_path.read_text(errors="replace")

    def logs(self) -> list[Path]:
        """Return the logs of all its processes."""
        return [self._folder / f"{self.name}-{number}.log" for number in range(1, self.starts + 1)]

    def spawn(self, command: Sequence[str], **environment: str) -> None:
        """Start a process on the host, and don't wait until it serves.

        Must be called in the thread of the event loop: the kernel kills the process with the thread that started it.
        """
        assert not self.running, f"{self.name} runs already"
        self.starts += 1
        self.paused = False
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                mortal(*self._network.command(self._host, *command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(**environment),
            )

    def pause(self) -> None:
        """Send it SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """Send it SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self.paused = False

    async def kill(self) -> None:
        """Send it SIGKILL, if it runs; return when it is gone.

        Raises:
            ProcessError: It had ended by itself.
        """
        if self._process is None:
            return
        self._process.kill()
        if (code := await self.ended()) != -signal.SIGKILL:
            raise ProcessError(f"{self.name} had ended by itself, with {code}: {self._tail()}")
        self._process = None

    async def terminate(self) -> int:
        """Send it SIGTERM; return its exit code when it is gone."""
        os.kill(self.pid, signal.SIGTERM)
        code = await self.ended()
        self._process = None
        return code

    async def ended(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process; return its exit code, or minus the signal that ended it.

        Raises:
            ProcessError: It does not end in time.
        """
        assert self._process is not None
        try:
            return await asyncio.to_thread(self._process.wait, timeout)
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{self.name} did not end within {timeout:g} s: {self._tail()}") from None

    def check_alive(self) -> None:
        """Check that it has not ended by itself.

        Raises:
            ProcessError: It has.
        """
        if self._process is not None and (code := self._process.poll()) is not None:
            raise ProcessError(f"{self.name} ended by itself, with {code}: {self._tail()}")

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            self._process = None

    def _tail(self) -> str:
        return "".join(self.log().splitlines(keepends=True)[-20:])
