"""A rendezvous service that can be killed and started again at the same address, over the same journal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from cli.cli_process import RALLYPOINT, clean_environment
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity, ClientTLS, Plaintext
from serving.conftest import Certificates
from support.mortal import mortal

PATIENCE = 60.0
"""Seconds to wait for steps that take a moment on an idle machine."""

_STARTER = Path(__file__).with_name("starter.py")
_LOOK = 0.005  # seconds between two checks that it listens


class MortalServer:
    """One service over all its processes: one port, one journal. Its methods block.

    Attributes:
        endpoint: Its address while it listens.
        port: The port of that address.
        journal: The file.
        pid: The id of the present process.
        kills: The number of killed processes.
    """

    def __init__(
        self,
        folder: Path,
        certificates: Certificates | None = None,
        flags: Sequence[str] = (),
        program: Sequence[str] = (str(RALLYPOINT),),
    ) -> None:
        """Start nothing yet.

        Args:
            folder: For the journal and the logs; made if it is missing.
            certificates: Certificates for TLS; None: plaintext.
            flags: Further flags of `rallypoint serve rendezvous`.
            program: The command that replaces `rallypoint`.
        """
        folder.mkdir(exist_ok=True)
        self._certificates = certificates
        self._flags = tuple(flags)
        self._program = tuple(program)
        # This reserves the port, so that no other process gets it. A server can still listen there.
        self._reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reservation.bind(("127.0.0.1", 0))
        self._address = self._reservation.getsockname()
        self._folder = folder
        # Start time of each of its processes, Unix seconds.
        self.starts: list[float] = []
        self._process: subprocess.Popen[str] | None = None
        self.port = int(self._address[1])
        self.endpoint = f"127.0.0.1:{self.port}"
        self.journal = folder / "journal.db"
        self.pid = 0
        self.kills = 0

    def start(self) -> float:
        """Start a process; return, when it listens, the seconds that this took.

        Raises:
            AssertionError: It did not listen.
        """
        began = time.monotonic()
        self.spawn()
        while not self._listens():
            assert time.monotonic() < began + PATIENCE, f"the server does not start: {self.log()}"
            time.sleep(_LOOK)
        return time.monotonic() - began

    def spawn(self) -> None:
        """Start a process, and don't wait until it listens."""
        self.starts.append(time.time())
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                mortal(*self._program, *self._arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                text=True,
                env=clean_environment(PYTHONPATH=str(Path(__file__).parents[1])),
            )
        self.pid = self._process.pid

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone.

        Raises:
            AssertionError: It had ended by itself.
        """
        os.kill(self.pid, signal.SIGKILL)
        self.kills += 1
        assert self._gone() == -signal.SIGKILL, f"the server ended by itself: {self.log()}"

    def pause(self) -> None:
        """SIGSTOP it."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT it."""
        os.kill(self.pid, signal.SIGCONT)

    def terminate(self) -> int:
        """SIGTERM it, and wait until it is gone; return its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self._gone()

    def close(self) -> None:
        """Leave no process behind."""
        self._reservation.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(PATIENCE)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def log(self) -> str:
        """Return the log of the present process, or of the last one."""
        return self._log.read_text()

    def complaints(self) -> list[str]:
        """Return the errors that its processes logged, and output outside the log. A test expects none."""
        return [line for log in self._folder.glob("server-*.log") for line in _complaints(log)]

    @property
    def security(self) -> ClientSecurity:
        """The security that its clients use."""
        if (files := self._certificates) is None:
            return Plaintext()
        return ClientTLS(files.ca, files.client, files.client_key)

    @property
    def _arguments(self) -> tuple[str, ...]:
        listening = ("--port", str(self.port), "--log-format", "json")
        serving: tuple[str, ...] = ("--insecure",)
        if (files := self._certificates) is not None:
            serving = ("--tls-cert", str(files.server), "--tls-key", str(files.server_key))
            serving += ("--tls-client-ca", str(files.ca))
        return (
            "serve",
            "rendezvous",
            *listening,
            *serving,
            "--journal",
            f"sqlite:{self.journal}",
            *self._flags,
        )

    @property
    def _log(self) -> Path:
        return self._folder / f"server-{len(self.starts)}.log"

    def _gone(self) -> int:
        """Wait for the end of the process; return its exit code, or minus the signal that ended it."""
        assert self._process is not None
        return self._process.wait(PATIENCE)

    def _listens(self) -> bool:
        try:
            socket.create_connection(self._address, PATIENCE).close()
        except OSError:
            return False
        return True


class QuickServer(MortalServer):
    """A server that starts within some 30 ms, because all imports are done by then; see `starter`."""

    def spawn(self) -> None:
        if self._process is None:
            self._process = subprocess.Popen(
                mortal(sys.executable, str(_STARTER), *self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=clean_environment(),
            )
        assert self._process.stdin is not None
        self.starts.append(time.time())
        self._process.stdin.write(f"{self._log}\n")
        self._process.stdin.flush()
        self.pid = int(self._next_line())

    def _gone(self) -> int:
        return int(self._next_line())

    def _next_line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@asynccontextmanager
async def serving(server: MortalServer) -> AsyncIterator[grpc.aio.Channel]:
    """Start a server, and yield a channel to it; leave none of its processes behind."""
    channel = open_channel(server.endpoint, server.security)
    try:
        await asyncio.to_thread(server.start)
        yield channel
    finally:
        await channel.close()
        await asyncio.to_thread(server.close)


def _complaints(log: Path) -> list[str]:
    *lines, last = log.read_text(errors="replace").split("\n")
    # A killed process may have left half a line behind.
    return [
        line for line in [*lines, *([last] if not last.startswith("{") and last else [])] if _is_grave(line)
    ]


def _is_grave(line: str) -> bool:
    record: dict[str, Any] = json.loads(line) if line.startswith("{") else {"level": "error"}
    return record["level"] in ("error", "critical")
