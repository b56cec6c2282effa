"""Copies growing log files to the agent's console: every byte, in order, and nobody waits for a slow terminal.

Three parts. `FileWatch` tells that a file has grown (inotify; nothing polls). A `Follower` reads one file in
bounded chunks and hands each on. An `OutputThread` does the blocking write(2) for one of the agent's streams:
a terminal, a pipe or a file each block in ways of their own, and setting O_NONBLOCK on a stream shared with
other programs would break those.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import queue
import select
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from rallypoint.agent.logs import ConsoleCopy, Streams

CHUNK = 128 * 1024
"""Bytes read and handed on at once by one follower: about 0.1 ms of the event loop, and the most it keeps in
memory. Larger chunks would make others wait longer, smaller ones cost more for each byte."""

GATHER = 0.05
"""Seconds that a follower waits, after a read that emptied the file, before it reads again, and that it gives an
unfinished line to be finished. Nobody sees so short a delay; without it, every line of a chatty worker would
cost the event loop a turn of its own."""

FALLBACK_INTERVAL = 0.2
"""Seconds between looks at a file that inotify can't watch: the kernel allows a user 128 watching processes by
default, and one host's containers share them."""

_IN_MODIFY = 0x2
_IN_Q_OVERFLOW = 0x4000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


class FileWatch:
    """Calls back, once, when a file is written to. Needs a running loop."""

    def __init__(self) -> None:
        """Opens inotify; where the kernel refuses, `arm` does too."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._armed: dict[int, Callable[[], None]] = {}
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def arm(self, fd: int, callback: Callable[[], None]) -> bool:
        """Has `callback` called at the next write to the open file `fd`; then arm again.

        One event for each arming, rather than one for each write: a worker that writes a million lines a second
        makes no million events. Arming what is armed changes nothing.

        Returns:
            False if the file can't be watched (inotify's limits are used up).
        """
        if self._fd < 0:
            return False
        # By descriptor: the file may have been renamed, and a network file system needn't look it up.
        path = f"/proc/self/fd/{fd}".encode()
        handle: int = self._libc.inotify_add_watch(self._fd, path, _IN_MODIFY | _IN_ONESHOT)
        if handle < 0:
            return False
        self._armed[handle] = callback
        return True

    def disarm(self, callback: Callable[[], None]) -> None:
        """Ends the watch that has this callback."""
        for handle in [handle for handle, armed in self._armed.items() if armed == callback]:
            del self._armed[handle]
            self._libc.inotify_rm_watch(self._fd, handle)

    def close(self) -> None:
        """Ends all watches."""
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
            self._armed.clear()

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 64 * 1024)
        except BlockingIOError:
            return
        at = 0
        while at < len(data):
            handle, mask, _cookie, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            # An overflow means lost events: any file may have grown.
            grown = list(self._armed) if mask & _IN_Q_OVERFLOW else [handle]
            for callback in [self._armed.pop(handle) for handle in grown if handle in self._armed]:
                callback()


class OutputThread:
    """Writes to one of the agent's streams from a thread of its own.

    When the stream's reader is gone, what comes is dropped: the files have it.
    """

    def __init__(self, fd: int) -> None:
        """Takes a descriptor, which stays the caller's; the thread starts with the first write."""
        self._fd = fd
        self._jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._broken = False

    async def write(self, data: bytes) -> None:
        """Returns when the stream has taken all of it. One write's bytes are never mixed with another's."""
        if self._thread is None:
            # A daemon: a terminal that is stopped for good must not keep the agent from exiting.
            self._thread = threading.Thread(target=self._run, name=f"console-{self._fd}", daemon=True)
            self._thread.start()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._jobs.put((data, done))
        await done

    async def close(self, timeout: float) -> None:
        """Lets the thread end after what was given to it, and waits for that up to `timeout` seconds."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            await asyncio.to_thread(self._thread.join, timeout)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            data, done = job
            rest = memoryview(data)
            while rest and not self._broken:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    # Somebody else made the stream non-blocking.
                    _wait_writable(self._fd)
                except OSError:
                    self._broken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                done.get_loop().call_soon_threadsafe(_resolve, done)


def _wait_writable(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    poll.poll()


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


class Follower:
    """Copies one growing file to an output, for as long as `finish` hasn't been called and then to its end.

    It copies whole lines, so that those of several workers don't mix. A line longer than a chunk goes out in
    pieces. An unfinished line goes out at the end; without a prefix already after a moment, since it may be a
    progress bar. Bytes are never decoded.
    """

    def __init__(
        self, path: Path, output: OutputThread, watch: FileWatch, prefix: bytes = b"", chunk: int = CHUNK
    ) -> None:
        """Takes an existing file; nothing is read before `start`."""
        self._path = path
        self._output = output
        self._watch = watch
        self._prefix = prefix
        self._chunk = chunk
        self._grown = asyncio.Event()
        self._finishing = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.error: OSError | None = None

    @property
    def done(self) -> bool:
        """Whether it has come to the end."""
        return self._task is not None and self._task.done()

    def start(self) -> None:
        """Begins to copy, from the file's beginning."""
        if self._task is None:
            self._task = asyncio.create_task(self._follow(), name=f"follow {self._path}")

    async def finish(self, timeout: float) -> bool:
        """Copies what is there by now to its end, then stops.

        To be called when nobody writes any more.

        Returns:
            False if that took longer than `timeout` seconds (the copying goes on behind the scenes) or the file
            could not be read (see `error`).
        """
        if self._task is None:
            return True
        self._finishing.set()
        self._grown.set()
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        return bool(done) and self.error is None

    async def abandon(self) -> None:
        """Stops at once, wherever the copying is."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        try:
            with open(self._path, "rb", buffering=0) as file:  # noqa: ASYNC230  # a log file: no wait
                await self._copy(file.fileno())
        except OSError as error:
            self.error = error
        finally:
            self._watch.disarm(self._grown.set)

    async def _copy(self, fd: int) -> None:
        offset = 0
        pending = b""  # the line that has no end yet
        in_line = False  # whether a first piece of it is out
        while True:
            self._grown.clear()
            # Before reading: what is written after the read is then not missed.
            watched = self._watch.arm(fd, self._grown.set)
            last = self._finishing.is_set()
            data = os.pread(fd, self._chunk, offset)
            if data:
                offset += len(data)
                whole, pending, in_line = cut(pending + data, self._prefix, in_line, self._chunk)
                if whole:
                    await self._output.write(whole)
                if len(data) < self._chunk:
                    await _happens(self._finishing, GATHER)
            elif offset > os.fstat(fd).st_size:
                offset = 0  # the worker has truncated its log; like tail -F, begin again
            elif last:
                break
            elif pending and not self._prefix:
                if not await _happens(self._grown, GATHER):
                    await self._output.write(pending)
                    pending = b""
            elif await _happens(self._grown, None if watched else FALLBACK_INTERVAL):
                # A traceback is written line by line: let it arrive as a whole, not with lines of others in it.
                await _happens(self._finishing, GATHER)
        if pending:
            begin, end = (b"" if in_line else self._prefix), (b"\n" if self._prefix else b"")
            await self._output.write(begin + pending + end)


async def _happens(event: asyncio.Event, within: float | None) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), within)
    return event.is_set()


def cut(data: bytes, prefix: bytes, in_line: bool, longest: int) -> tuple[bytes, bytes, bool]:
    """Splits what was read into what can go out now and what waits for the end of its line.

    Args:
        data: bytes not yet out.
        prefix: to put before each line.
        in_line: whether `data` continues a line whose beginning is out.
        longest: an unfinished line of that many bytes is not kept back.

    Returns:
        What goes out, what is kept, and `in_line` for the next call.
    """
    end = data.rfind(b"\n") + 1
    out = b""
    if end:
        lines = data[: end - 1].replace(b"\n", b"\n" + prefix) + b"\n"
        out = lines if in_line else prefix + lines
        in_line = False
    rest = data[end:]
    if len(rest) < longest:
        return out, rest, in_line
    return out + (rest if in_line else prefix + rest), b"", True


class Console:
    """The agent's standard output and error, and the followers that write to them. Needs a running loop."""

    def __init__(self, stdout: int = 1, stderr: int = 2) -> None:
        """Takes the two descriptors, which stay the caller's."""
        self._outputs = {Streams.STDOUT: OutputThread(stdout), Streams.STDERR: OutputThread(stderr)}
        self._watch = FileWatch()
        self._followers: list[Follower] = []

    def follow(self, copy: ConsoleCopy) -> Follower:
        """Makes the follower of one stream; not started yet."""
        self._followers = [follower for follower in self._followers if not follower.done]
        follower = Follower(copy.path, self._outputs[copy.stream], self._watch, copy.prefix)
        self._followers.append(follower)
        return follower

    async def close(self, timeout: float) -> bool:
        """Finishes all followers and the writing, within about `timeout` seconds; false if bytes were left."""
        results = await asyncio.gather(*(follower.finish(timeout) for follower in self._followers))
        for follower in self._followers:
            await follower.abandon()
        self._watch.close()
        for output in self._outputs.values():
            await output.close(timeout if all(results) else 0.0)
        return all(results)
