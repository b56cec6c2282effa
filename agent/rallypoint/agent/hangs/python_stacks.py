"""Python stacks of a worker's threads, without its help: it may hold the GIL, or sleep for ever.

First its own signal handler (faulthandler's, which needs no GIL) writes them into a pipe that the agent made for
it; where it has none, py-spy reads them out of its memory, if that is installed; and a process that is about to be
killed anyway can still say them by dying of SIGABRT, into its log.
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

FIRST_WORD = 0.5
"""Seconds until a process that was asked begins to write. Milliseconds as a rule; one in uninterruptible sleep
never does, and the time is needed for the other ways."""

QUIET = 0.1
"""Seconds of silence after which it has said everything: nothing marks the end. It writes a line every few
microseconds, unless the machine has no processor for it."""

MOST_BYTES = 1 << 20
"""Of what a process may say; faulthandler stops at 100 threads of 100 frames."""

_TO_DIE = 0.3  # seconds that a py-spy has that was killed; it needs milliseconds, or sits in the kernel
_PIPE_BYTES = 256 * 1024
_CHUNK = 1 << 16
_BLOCK = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
_DUMPED = re.compile(r"^(Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)


class StackPipe:
    """A named pipe into which one worker, its child processes included, writes its stacks when asked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Use `StackPipe.make`."""
        self.path = path
        self._descriptor = descriptor
        self._requests = 0
        self._closed = False

    @classmethod
    def make(cls, path: Path) -> Self:
        """Makes the pipe.

        Raises:
            OSError: it can't be made there.
        """
        os.mkfifo(path, 0o600)
        # For writing too: with no writer left, a pipe that is only read would be at its end for ever.
        descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(
            OSError
        ):  # the user's allowance for pipes may be used up; the usual size does as a rule
            fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        return cls(path, descriptor)

    def close(self) -> None:
        """Removes it; who is asking gets what is still said."""
        if not self._closed:
            self._closed = True
            self.path.unlink(missing_ok=True)
            self._let_go()

    def _let_go(self) -> None:
        if self._closed and not self._requests:
            os.close(self._descriptor)

    async def request_stacks(self, pidfd: int, *, resume: bool, said: list[bytes]) -> None:
        """Has a process write its stacks, and reads them until it is quiet. One at a time.

        Call it only for a process that catches STACK_SIGNAL: it would kill any other.

        Args:
            pidfd: the process.
            resume: whether to send SIGCONT: a stopped process hears nothing else.
            said: gets what was read, piece by piece, so that it is there even if this is cancelled.
        """
        if self._closed:
            return
        with suppress(BlockingIOError):  # left by whoever wrote unasked
            while os.read(self._descriptor, _CHUNK):
                pass
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        silence = loop.call_later(FIRST_WORD, _finish, done)
        left = MOST_BYTES

        def read() -> None:
            nonlocal silence, left
            with suppress(BlockingIOError):
                piece = os.read(self._descriptor, min(_CHUNK, left))
                said.append(piece)
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
            pass  # it has gone by itself
        finally:
            silence.cancel()
            loop.remove_reader(self._descriptor)
            self._requests -= 1
            self._let_go()


def _finish(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


async def spy(pid: int) -> str:
    """Stacks as py-spy reads them out of a process; empty if it isn't installed, or can't.

    Cancelled, it leaves no process behind. The process is not paused: one that hangs stands still anyway, and none
    is left stopped by a py-spy that was killed.
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
    """Puts the thread that hangs first in what faulthandler wrote.

    Which it is, the timer doesn't say. Where the scope is a place in a file (what `expires` calls it by default), a
    thread that is in that file comes before the others; then the main thread, which faulthandler writes last.

    Args:
        dump: what faulthandler wrote.
        scope: of the timer.
    """
    head, *blocks = _BLOCK.split(dump)
    file, _, line = scope.rpartition("#")
    mark = f'File "{file}"' if line.isdigit() else None
    blocks = [block.rstrip() for block in reversed(blocks)]
    blocks.sort(key=lambda block: mark is not None and mark not in block)
    return "\n\n".join(block for block in (head.strip(), *blocks) if block)


def innermost(stacks: str) -> str:
    """The innermost frame of the first thread in faulthandler's or py-spy's words, as `function (file:line)`."""
    written = re.search(r'File "([^"]*)", line (\d+|\?\?\?) in (.+)$', stacks, re.MULTILINE)
    if written:
        return f"{written[3]} ({os.path.basename(written[1])}:{written[2]})"
    spied = re.search(r"^ {4}(\S.*) \(([^()]*:\d+)\)$", stacks, re.MULTILINE)
    return f"{spied[1]} ({os.path.basename(spied[2])})" if spied else ""


def looks_like_stacks(text: str) -> bool:
    """Whether faulthandler wrote this."""
    return _DUMPED.search(text) is not None


def last_dump(path: Path, offset: int) -> str:
    """What faulthandler wrote into a file as its process died, after the first `offset` bytes; empty if nothing."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            text = file.read(MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    at = text.find("Fatal Python error: ")
    return text[at:].strip() if at >= 0 else ""
