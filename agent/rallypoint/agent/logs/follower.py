"""Copies a growing log file to an output, in whole lines and bounded pieces."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from rallypoint.agent.logs.files import LogFile, Piece
from rallypoint.agent.logs.plan import ConsoleCopy
from rallypoint.agent.logs.streams import Streams
from rallypoint.agent.logs.watch import FALLBACK_INTERVAL, FileWatch
from rallypoint.rpc.logs import get_logger

CHUNK = 128 * 1024
"""Bytes read and written at once by one follower: about 0.1 ms of the event loop, and the most that it keeps in
memory. Larger chunks would delay other tasks longer, smaller ones cost more for each byte."""

GATHER = 0.05
"""Seconds that a follower waits, after a read that reached the end of the file, before it reads again or gives up
waiting for the end of an unfinished line. Too short to be visible; without it, every line of a worker that logs a lot
would cost the event loop one iteration."""

LIVE_GATHER = 0.005
"""The same for a terminal that a person types at: echo must not lag."""


class OutputSink(Protocol):
    """The destination of a follower's pieces."""

    @property
    def turn(self) -> AbstractAsyncContextManager[object]:
        """Held while a piece is read and written: bounds the memory of all followers of an output."""

    async def write(self, data: bytes) -> None:
        """Write all of it; return when that is done."""


class Follower:
    """Copies one growing file to an output until `finish` is called, and then to its end.

    It copies whole lines, so that lines of several workers do not mix. A line longer than a chunk is written in
    pieces. An unfinished line is written at the end; without a prefix already after `gather` seconds, because it may
    be a progress bar. Bytes are never decoded. Files may be rotated meanwhile.
    """

    def __init__(
        self,
        path: Path,
        output: OutputSink,
        watch: FileWatch,
        prefix: bytes = b"",
        *,
        chunk: int = CHUNK,
        gather: float = GATHER,
        choose: Callable[[bytes], bytes] | None = None,
    ) -> None:
        """Set up for an existing file; nothing is read before `start`.

        Args:
            prefix: put before each line.
            chunk: most bytes to read at once.
            gather: see GATHER.
            choose: gets whole lines (one longer than a chunk in pieces), returns those to be copied; None: all.
        """
        self.path = path
        self.error: OSError | None = None
        self._output = output
        self._watch = watch
        self._prefix = prefix
        self._chunk = chunk
        self._gather = gather
        self._choose = choose
        self._offset = 0
        self._skipped = 0
        self._pending = b""  # the unfinished line
        self._in_line = False  # true if its first piece is already written
        self._grown = asyncio.Event()
        self._finishing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        """True if the copying has ended."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Begin to copy, from the file's beginning."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=f"follow {self.path}")

    async def finish(self, timeout: float) -> bool:
        """Copy the rest of the file, then stop. Call it after the last writer has ended.

        Returns:
            False if that took longer than `timeout` seconds (the copying continues in the background) or the file
            could not be read (see `error`).
        """
        if self._task is None:
            return True
        self._finishing.set()
        self._grown.set()
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if done and not self._task.cancelled():
            self._task.result()  # an exception must not look like a normal end
        return bool(done) and self.error is None

    def behind(self) -> int:
        """Return the count of bytes written but not copied: still to copy, or removed by rotation before that."""
        if self._task is None:
            return 0
        if self._task.done() and not self._task.cancelled() and self.error is None:
            return self._skipped
        with contextlib.suppress(OSError), LogFile(self.path) as file:
            return self._skipped + len(self._pending) + max(0, file.extent()[1] - self._offset)
        return self._skipped

    def cancel(self) -> None:
        """Cancel the copying without waiting for its end."""
        if self._task is not None:
            self._task.cancel()

    async def abandon(self) -> None:
        """Cancel the copying and wait until it has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        try:
            with LogFile(self.path) as file:
                await self._copy(file)
        except OSError as error:
            self.error = error
        finally:
            self._watch.disarm(self._grown.set)

    async def _copy(self, file: LogFile) -> None:
        while True:
            self._grown.clear()
            # Arm before reading, so that bytes written after the read are not missed.
            fd = file.fileno()
            watched = self._watch.arm(fd, self._grown.set)
            last = self._finishing.is_set()
            async with self._output.turn:
                piece = file.read(self._offset, self._chunk)
                await self._pass_on(piece)
            if piece.data:
                if len(piece.data) < self._chunk:
                    await _happens(self._finishing, self._gather)
            elif piece.begin < self._offset:
                self._offset = piece.begin  # the worker has truncated its log; like tail -F, begin again
            elif file.fileno() != fd:
                continue  # it was rotated: watch the new file
            elif last:
                break
            elif self._pending and not self._prefix and self._choose is None:
                if not await _happens(self._grown, self._gather):
                    await self._output.write(self._pending)
                    self._pending = b""
            elif await _happens(self._grown, None if watched else FALLBACK_INTERVAL):
                # A traceback is written line by line: wait for all of it, so that no lines of others get into it.
                await _happens(self._finishing, self._gather)
        await self._end_line()

    async def _pass_on(self, piece: Piece) -> None:
        if not piece.data:
            return
        self._skipped += piece.begin - self._offset
        whole, pending, in_line = cut(
            self._pending + piece.data, self._prefix, self._in_line, self._chunk, self._choose
        )
        if whole:
            await self._output.write(whole)
        self._offset, self._pending, self._in_line = piece.end, pending, in_line

    async def _end_line(self) -> None:
        pending = self._pending
        if pending and self._choose is not None:
            pending = self._choose(pending)
        if pending:
            begin, end = (b"" if self._in_line else self._prefix), (b"\n" if self._prefix else b"")
            await self._output.write(begin + pending + end)
        self._pending = b""


async def _happens(event: asyncio.Event, within: float | None) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within)
    return event.is_set()


def cut(
    data: bytes, prefix: bytes, in_line: bool, longest: int, choose: Callable[[bytes], bytes] | None = None
) -> tuple[bytes, bytes, bool]:
    """Split bytes into those to write now and the unfinished line to keep.

    Args:
        data: bytes not yet written.
        prefix: to put before each line.
        in_line: true if `data` continues a line whose beginning is already written.
        longest: an unfinished line of that many bytes is written at once.
        choose: selects the lines to write; None: all.

    Returns:
        The bytes to write, the bytes to keep, and `in_line` for the next call.
    """
    end = data.rfind(b"\n") + 1
    if end == len(data) and not in_line:
        whole, rest = data, b""
    else:
        whole, rest = data[:end], data[end:]
    if choose is not None:
        whole = choose(whole)
    if whole and prefix:
        whole = whole[:-1].replace(b"\n", b"\n" + prefix) + b"\n"
        if not in_line:
            whole = prefix + whole
    in_line = in_line and not end
    if len(rest) < longest:
        return whole, rest, in_line
    if choose is not None:
        # Each selected text must be readable by itself: a piece of an overlong line counts as a line.
        chosen = choose(rest)
        return whole + (prefix + chosen + b"\n" if chosen else b""), b"", False
    return whole + (rest if in_line else prefix + rest), b"", True


# ---- Shows growing log files on the agent's console: every byte, in order, and no task waits for a slow terminal.
#
# A `Follower` reads each file; an `OutputThread` does the blocking write(2) for one of the agent's streams: terminals,
# pipes and files block in different ways, and setting O_NONBLOCK on a stream shared with other programs would break
# those.
#
# A console slower than the workers falls behind, which costs no memory: the files have everything. At the end of the
# job it gets a few seconds more; the rest is left out, and a warning logs how many bytes.


MOST_FOLLOWERS = 1024
"""Streams that one console still copies: a console slower than the restarts also has those of earlier attempts."""

_TURNS = 2  # pieces of one stream in memory: the one being written, and the next
_FILES_NAMED = 3

_log = get_logger("rallypoint.agent")


class OutputThread:
    """Writes to one of the agent's streams from a thread of its own.

    When the stream's reader is gone, further bytes are dropped: the files have them.

    Attributes:
        error: the error since which bytes are dropped; None if none are.
    """

    def __init__(self, fd: int) -> None:
        """`fd`: stays the caller's to close. The thread starts with the first write."""
        self._fd = fd
        self._jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None
        # A follower waits here before it reads a piece, so that a hundred followers do not hold a hundred pieces.
        self.turn = asyncio.Semaphore(_TURNS)

    async def write(self, data: bytes) -> None:
        """Write all of it; return when that is done. The bytes of two writes never mix."""
        if self._thread is None:
            # A daemon thread: a terminal that never reads again must not keep the agent from exiting.
            self._thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            self._thread.start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((data, done))
        await done

    async def close(self, timeout: float) -> None:
        """End the thread after all queued writes; wait for that up to `timeout` seconds."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            data, done = job
            rest = memoryview(data)
            while rest and self.error is None:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    # Another program made the stream non-blocking.
                    _wait_writable(self._fd)
                except OSError as error:
                    self.error = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task waits any more
                done.get_loop().call_soon_threadsafe(_resolve, done)


def _wait_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class Console:
    """The agent's standard output and error, and the followers that write to them. Needs a running loop."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        """The two descriptors stay the caller's to close."""
        self._outputs = {Streams.STDOUT: OutputThread(stdout), Streams.STDERR: OutputThread(stderr)}
        self._watch = FileWatch()
        self._followers: list[Follower] = []

    def follow(self, copy: ConsoleCopy) -> Follower:
        """Make the follower of one stream; not started yet."""
        self._followers = [follower for follower in self._followers if not follower.done]
        gather = LIVE_GATHER if copy.live else GATHER
        follower = Follower(copy.path, self._outputs[copy.stream], self._watch, copy.prefix, gather=gather)
        self._followers.append(follower)
        for oldest in self._followers[:-MOST_FOLLOWERS]:
            oldest.cancel()
        return follower

    async def close(self, timeout: float) -> bool:
        """Finish all followers and the writing, within about `timeout` seconds.

        Returns:
            False if bytes were left out; a warning logs how many, and the files that have them.
        """
        results = await asyncio.gather(*(follower.finish(timeout) for follower in self._followers))
        behind = {follower.path: follower.behind() for follower in self._followers}
        for follower in self._followers:
            await follower.abandon()
        self._watch.close()
        for output in self._outputs.values():
            await output.close(timeout if all(results) else 0.0)
        left = {str(path): count for path, count in behind.items() if count}
        if left:
            most = sorted(left, key=left.__getitem__, reverse=True)[:_FILES_NAMED]
            _log.warning(
                "the console was too slow to show everything", left_out_bytes=sum(left.values()), files=most
            )
        return all(results)
