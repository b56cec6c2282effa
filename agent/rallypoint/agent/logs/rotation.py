"""The agent's side of log rotation: the pipes that workers write to, and the copier process that empties them.

The agent holds the read end of every pipe too: if the copier is killed, the content stays there for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.agent.logs import copier as program
from rallypoint.agent.logs.plan import WorkerLogs
from rallypoint.agent.logs.streams import LEAST_ROTATED, LogError, Streams
from rallypoint.rpc.logs import get_logger

PIPE_BYTES = 256 * 1024
"""Preferred size of a worker's pipe: at 100 MB/s it gives the copier 2.6 ms before the worker has to wait."""

ALL_PIPES_BYTES = 32 << 20
"""Size of all pipes together: a user may have 64 MiB (pipe-user-pages-soft), after that pipes of two pages."""

_SHORT_LIFE = 1.0  # seconds
_FAILURES = 5  # copiers in a row that soon ended with an error: give up, because the next would fail too
_KILLS = 100  # copiers in a row that were soon killed, by the OOM killer or on purpose: give up

_log = get_logger("rallypoint.agent")


@dataclass(slots=True)
class _Pipe:
    """The pipe of one stream of one worker."""

    local_rank: int
    stream: Streams
    file: Path
    path: Path
    fd: int


@dataclass(slots=True)
class _CopierProcess:
    """One copier process."""

    process: subprocess.Popen[bytes]
    pidfd: int
    began: float
    inbox: bytes = b""
    flushes: dict[int, asyncio.Future[None]] = field(default_factory=dict)


class Rotation:
    """Moves the output of one attempt's workers through pipes into files of bounded size."""

    def __init__(
        self, logs: Mapping[int, WorkerLogs], folder: Path, *, max_bytes: int, keep_files: int
    ) -> None:
        """Make the pipes and start the copier. Needs a running loop.

        Args:
            logs: the files by local rank; they exist.
            folder: for the pipes' names; on a file system of this host.
            max_bytes: size at which a file is rotated; at least LEAST_ROTATED.
            keep_files: number of rotated files of a stream to keep; at least 1.

        Raises:
            LogError: the pipes can't be made, or the copier not be started.
        """
        self._loop = asyncio.get_running_loop()
        self._max_bytes, self._keep_files = max(LEAST_ROTATED, max_bytes), max(1, keep_files)
        self._pipes: list[_Pipe] = []
        self._numbers = itertools.count(1)
        self._copier: _CopierProcess | None = None
        self._short_lives = 0
        self._finishing = False
        self._ended: asyncio.Future[None] = self._loop.create_future()  # no copier is left
        self._incomplete: set[int] = set()
        try:
            self._make_pipes(logs, folder)
            self._start()
        except OSError as error:
            self._close_pipes()
            raise LogError(f"can't rotate the log files of workers: {error.strerror}") from error

    @property
    def pid(self) -> int | None:
        """Process id of the copier; None if none runs."""
        return self._copier.process.pid if self._copier is not None else None

    def target(self, local_rank: int, stream: Streams) -> Path:
        """Return the pipe that the worker opens instead of its file."""
        return next(
            pipe.path for pipe in self._pipes if pipe.local_rank == local_rank and pipe.stream is stream
        )

    def is_complete(self, local_rank: int) -> bool:
        """True if no output of the worker has been dropped so far."""
        return local_rank not in self._incomplete

    async def flush(self, local_rank: int, timeout: float) -> bool:
        """Wait until all present output of a worker is in its files; false if that takes over `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while (copier := self._copier) is not None:
                    if await self._flushed(copier, local_rank):
                        return True
        return False

    async def _flushed(self, copier: _CopierProcess, local_rank: int) -> bool:
        """Request a flush; true if this copier has replied, false if it ended before."""
        replies = []
        for index, pipe in enumerate(self._pipes):
            if pipe.local_rank == local_rank:
                number = next(self._numbers)
                reply = copier.flushes[number] = self._loop.create_future()
                replies.append(reply)
                self._send(copier, {"flush": number, "stream": index})
        if replies:
            await asyncio.wait(replies)
        return not any(reply.cancelled() for reply in replies)

    async def finish(self, timeout: float) -> bool:
        """Wait until all output is in the files. Call it after the last writer has ended.

        Returns:
            False if that took longer than `timeout` seconds; the copier then continues by itself.
        """
        self._finishing = True
        copier = self._copier
        if copier is not None:
            _close(copier.process.stdin)
            await asyncio.wait([self._ended], timeout=timeout)
        # Without an open read end, writers to a full pipe get an error (EPIPE) instead of blocking.
        self._close_pipes()
        return self._copier is None

    # -- the pipes

    def _make_pipes(self, logs: Mapping[int, WorkerLogs], folder: Path) -> None:
        size = min(PIPE_BYTES, ALL_PIPES_BYTES // max(1, 2 * len(logs)))
        for local_rank, files in logs.items():
            for stream, file in ((Streams.STDOUT, files.stdout), (Streams.STDERR, files.stderr)):
                path = folder / f"{local_rank}.{stream.name}.{os.urandom(4).hex()}".lower()
                os.mkfifo(path, 0o600)
                fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                self._pipes.append(_Pipe(local_rank, stream, file, path, fd))
                with contextlib.suppress(OSError):  # the kernel's limit per user: a small pipe works too
                    fcntl.fcntl(fd, fcntl.F_SETPIPE_SZ, size)

    def _close_pipes(self) -> None:
        for pipe in self._pipes:
            pipe.path.unlink(missing_ok=True)
            os.close(pipe.fd)
        self._pipes.clear()

    # -- the process

    def _start(self) -> _CopierProcess:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", program.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[pipe.fd for pipe in self._pipes],
            # The terminal's signals must not reach it. It stays in the agent's session: when the spawner dies, the
            # agent kills its orphans in other sessions, and must not kill the copier.
            process_group=0,
        )
        copier = self._copier = _CopierProcess(process, os.pidfd_open(process.pid), self._loop.time())
        assert process.stdout is not None, "it is a pipe"
        os.set_blocking(process.stdout.fileno(), False)
        self._loop.add_reader(process.stdout.fileno(), self._receive, copier)
        self._loop.add_reader(copier.pidfd, self._gone, copier)
        streams = [{"fd": pipe.fd, "path": os.fsdecode(pipe.file)} for pipe in self._pipes]
        self._send(copier, {"max_bytes": self._max_bytes, "keep_files": self._keep_files, "streams": streams})
        return copier

    def _send(self, copier: _CopierProcess, request: Mapping[str, object]) -> bool:
        assert copier.process.stdin is not None, "it is a pipe"
        try:
            copier.process.stdin.write(json.dumps(request).encode() + b"\n")
            copier.process.stdin.flush()
        except (OSError, ValueError):
            return False  # the copier is gone, or finishing
        return True

    def _receive(self, copier: _CopierProcess) -> None:
        assert copier.process.stdout is not None, "it is a pipe"
        try:
            data = os.read(copier.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(copier.process.stdout.fileno())
            return
        *lines, copier.inbox = (copier.inbox + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if "flushed" in event:
                reply = copier.flushes.pop(event["flushed"], None)
                if reply is not None and not reply.done():
                    reply.set_result(None)
            else:
                self._lose(event["stream"], event["lost"], event["error"])

    def _lose(self, index: int, lost: int, error: str) -> None:
        pipe = self._pipes[index] if index < len(self._pipes) else None
        if pipe is None:
            return
        if not error:
            _log.error("output of a worker is lost", file=str(pipe.file), bytes=lost)
            return
        self._incomplete.add(pipe.local_rank)
        _log.error("output of a worker can't be written, and is dropped", file=str(pipe.file), reason=error)

    def _gone(self, copier: _CopierProcess) -> None:
        self._loop.remove_reader(copier.pidfd)
        os.close(copier.pidfd)
        self._receive(copier)
        assert copier.process.stdout is not None, "it is a pipe"
        self._loop.remove_reader(copier.process.stdout.fileno())
        code = copier.process.wait()
        copier.process.stdout.close()
        _close(copier.process.stdin)
        for reply in copier.flushes.values():
            reply.cancel()
        self._copier = None
        if code != 0 and self._pipes:
            self._replace(copier, code)
        if self._copier is None and not self._ended.done():
            self._ended.set_result(None)

    def _replace(self, copier: _CopierProcess, code: int) -> None:
        """Start another copier, which continues with the content of the pipes; give up after repeated failures."""
        self._short_lives = self._short_lives + 1 if self._loop.time() < copier.began + _SHORT_LIFE else 0
        if self._short_lives < (_FAILURES if code > 0 else _KILLS):
            _log.warning("the log copier ended, starting another", exit_code=code)
            try:
                next_one = self._start()
                if self._finishing:
                    _close(next_one.process.stdin)
                return
            except OSError as error:
                _log.error("the log copier can't be started", reason=error.strerror)
        # Workers blocked in a write would wait for ever; closing the pipes gives them an error instead.
        _log.error("the log copier keeps ending: workers can't write their output any more", exit_code=code)
        self._close_pipes()


def _close(file: object) -> None:
    with contextlib.suppress(OSError):
        if file is not None:
            file.close()  # type: ignore[attr-defined]
