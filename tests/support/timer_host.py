"""The timer socket of an agent, with workers that wait for the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from rallypoint.agent.sockets.timers import TimerSocket
from support.host_workers import HostWorkers
from support.remembered_timers import RememberedTimers
from support.waiting import until

# The start of a worker's script: each `ask()` prints a line, and waits for a line from the test's `answer`.
PRELUDE = """
import asyncio, multiprocessing, os, sys, threading, time
from rallypoint.timer import configure, expires

def ask(text="ready"):
    print(text, flush=True)
    return sys.stdin.readline()

def reap(*children):
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0, f"a child ended with {status:#x}"
"""


class TimerHost(HostWorkers):
    """A timer socket whose workers are the processes started by `start` and `run`."""

    def __init__(self, path: Path, base_rank: int = 0, **settings: Any) -> None:
        """`settings`: as TimerSocket's."""
        super().__init__(base_rank=base_rank)
        self.path = path
        self.timers = RememberedTimers()
        self.processes: list[asyncio.subprocess.Process] = []
        self.socket = TimerSocket(path, self.timers, self, **settings)

    async def start(self, script: str) -> asyncio.subprocess.Process:
        """Run PRELUDE and a script. Some scripts test a fork beside threads, so that warning is ignored."""
        fork = "ignore:This process:DeprecationWarning"
        return await self.run(sys.executable, "-W", "error", "-W", fork, "-c", PRELUDE + script)

    async def run(self, *program: str | Path) -> asyncio.subprocess.Process:
        """Start a program as worker 0@1."""
        process = await asyncio.create_subprocess_exec(
            *program,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "RALLYPOINT_TIMER_SOCKET": str(self.path)},
            start_new_session=True,
        )
        self.processes.append(process)
        self.pids[process.pid] = "0@1"
        self.socket.introduce()
        return process

    def connect(self) -> socket.socket:
        """Connect this process as a worker; return the raw socket."""
        self.pids[os.getpid()] = "0@1"
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(str(self.path))
        return connection

    async def shows(self, *scopes: str) -> None:
        """Wait until the agent has these timers and no others."""
        await until(lambda: self.timers.scopes() == sorted(scopes))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Serve the socket; at the end, kill all workers and their children."""
        await self.socket.start()
        try:
            yield
        finally:
            for process in self.processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.communicate()
            await self.socket.stop()


async def asked(worker: asyncio.subprocess.Process) -> str:
    """Wait for the next line that a worker prints, and return it."""
    assert worker.stdout is not None
    return (await worker.stdout.readline()).decode().strip()


async def answer(worker: asyncio.subprocess.Process, line: str = "") -> None:
    """Send a line to a worker, which then continues."""
    assert worker.stdin is not None
    worker.stdin.write(f"{line}\n".encode())
    await worker.stdin.drain()


async def finished(worker: asyncio.subprocess.Process) -> str:
    """Wait until a worker has ended with exit code 0; return its unread output."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.close()
    rest = (await worker.stdout.read()).decode()
    assert await worker.wait() == 0
    return rest
