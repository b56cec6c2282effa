"""Python stacks of a worker's threads, without its cooperation: it may hold the GIL, or sleep for ever.

First its own signal handler (faulthandler's, which needs no GIL) writes them into a pipe that the agent made for
it; if it has none, py-spy reads them out of its memory, if that is installed; and a process that is about to be
killed anyway can still write them into its log, when SIGABRT ends it.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from rallypoint.timer.worker.process import STACK_SIGNAL

FIRST_OUTPUT_TIMEOUT = 0.5
"""Seconds until a process must begin to write after the request. Usually it takes milliseconds; in uninterruptible
sleep a process never writes, and the time is needed for the other methods."""

QUIET = 0.1
"""Seconds without output after which the output is complete: it has no end mark. A process writes a line every few
microseconds, unless the machine has no processor for it."""

MOST_BYTES = 1 << 20
"""Limit of a process's output; faulthandler stops at 100 threads of 100 frames."""

_TO_DIE = (
    0.3  # seconds until a killed py-spy must have ended; it needs milliseconds, or is stuck in the kernel
)
_PIPE_BYTES = 256 * 1024
_CHUNK = 1 << 16
_BLOCK = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_DUMPED = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


class StackPipe:
    """A named pipe into which one worker and its child processes write their stacks on request."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `StackPipe.make`."""
        self.path = path
        self._descriptor = descriptor
        self._requests = 0
        self._closed = False

    @classmethod
    def make(cls, path: Path) -> Self:
        """Make the pipe.

        Raises:
            OSError: it can't be made there.
        """
        os.mkfifo(path, 0o600)
        # Opened for writing too: without any writer, reads would return end of file for ever.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        # The user's limit for pipes may be reached; the default size is usually enough.
        with suppress(OSError):
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return cls(path, descriptor)

    def close(self) -> None:
        """Remove the pipe; requests in progress still receive their output."""
        if not self._closed:
            self._closed = True
            self.path.unlink(missing_ok=True)
            self._let_go()

    def _let_go(self) -> None:
        if self._closed and not self._requests:
            os.close(self._descriptor)

    async def request_stacks(self, pidfd: int, *, resume: bool, output: list[bytes]) -> None:
        """Have a process write its stacks, and read them until it is quiet. One request at a time.

        Call it only for a process that catches STACK_SIGNAL: the signal would kill any other.

        Args:
            resume: also send SIGCONT: a stopped process handles no other signal.
            output: receives the output piece by piece, so that it is available even if this is cancelled.
        """
        if self._closed:
            return
        with suppress(BlockingIOError):  # drop output that was written without a request
            while os.read(self._descriptor, _CHUNK):
                pass
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        silence = loop.call_later(FIRST_OUTPUT_TIMEOUT, _finish, done)
        left = MOST_BYTES

        def read() -> None:
            nonlocal silence, left
            with suppress(BlockingIOError):
                piece = os.read(self._descriptor, min(_CHUNK, left))
                output.append(piece)
                left -= len(piece)
                silence.cancel()
                silence = loop.call_later(QUIET if left else 0.0, _finish, done)
                if not left:
                    loop.remove_reader(self._descriptor)

        self._requests += 1
        loop.add_reader(self._descriptor, read)
        try:
            signal.pidfd_send_signal(pidfd, STACK_SIGNAL)
            if resume:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            await done
        except ProcessLookupError:
            pass  # the process has ended by itself
        finally:
            silence.cancel()
            loop.remove_reader(self._descriptor)
            self._requests -= 1
            self._let_go()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


async def spy(pid: int) -> str:
    """Stacks of a process, read by py-spy; empty if it isn't installed, or fails.

    If it is cancelled, no py-spy is left behind. py-spy does not pause the process: its stacks don't change while it
    hangs, and a py-spy that is killed must not leave it stopped.
    """
    program = _find_spy()
    if program is None:
        return ""
    try:
        process = await asyncio.create_subprocess_exec(
            *(program, "dump", "--nonblocking", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError:
        return ""
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _TO_DIE)
    return output[:MOST_BYTES].decode("utf-8", "replace").strip() if process.returncode == 0 else ""


def _find_spy() -> str | None:
    beside = Path(sys.executable).with_name("py-spy")
    return shutil.which("py-spy") or (str(beside) if os.access(beside, os.X_OK) else None)


def in_order(dump: str, scope: str) -> str:
    """Reorder the output of faulthandler: the hung thread first.

    The timer doesn't name its thread. If the scope is a line of a file (the default of `expires`), threads in that file
    come first; then the main thread, which faulthandler writes last.
    """
    head, *blocks = _BLOCK.split(dump)
    file, _, line = scope.rpartition("#")
    mark = f'File "{file}"' if line.isdigit() else None
    blocks = [block.rstrip() for block in reversed(blocks)]
    blocks.sort(key=lambda block: mark is not None and mark not in block)
    return "\n\n".join(block for block in (head.strip(), *blocks) if block)


def innermost(stacks: str) -> str:
    """The innermost frame of the first thread in output of faulthandler or py-spy, as `function (file:line)`."""
    written = re.search(r'File "([^"]*)", line (\d+|\?\?\?) in (.+)$', stacks, re.MULTILINE)
    if written:
        return f"{written[3]} ({os.path.basename(written[1])}:{written[2]})"
    spied = re.search(r"^ {4}(\S.*) \(([^()]*:\d+)\)$", stacks, re.MULTILINE)
    return f"{spied[1]} ({os.path.basename(spied[2])})" if spied else ""


def looks_like_stacks(text: str) -> bool:
    """True if a text is output of faulthandler."""
    return _DUMPED.search(text) is not None


def last_dump(path: Path, offset: int) -> str:
    """Output of faulthandler in a file from the end of its process, after the first `offset` bytes; may be empty."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    at = text.find("Fatal Python error: ")
    return text[at:].strip() if at >= 0 else ""
