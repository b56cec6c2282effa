"""Shows growing log files on the agent's console: every byte, in order, and nobody waits for a slow terminal.

A `Follower` (rallypoint.agent.follower) reads each file; an `OutputThread` does the blocking write(2) for one of the
agent's streams: a terminal, a pipe or a file each block in ways of their own, and setting O_NONBLOCK on a stream
shared with other programs would break those.

A console that takes less than workers write falls behind, and costs no memory for it: the files have everything. At
the job's end it gets a few seconds more; what it has not shown by then is left out, and that is said.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import select
import threading

from rallypoint.agent.file_watch import FileWatch
from rallypoint.agent.follower import Follower
from rallypoint.agent.logs import ConsoleCopy
from rallypoint.agent.streams import Streams
from rallypoint.rpc.logs import get_logger

MOST_FOLLOWERS = 1024
"""Streams that one console catches up with: those of a restart before last, if it is slower than the restarts."""

_TURNS = 2  # pieces of one stream in memory: one that is being written, and the next
_FILES_NAMED = 3

_log = get_logger("rallypoint.agent")


class OutputThread:
    """Writes to one of the agent's streams from a thread of its own.

    When the stream's reader is gone, what comes is dropped: the files have it.

    Attributes:
        error: why what comes is dropped; None as long as nothing is.
    """

    def __init__(self, fd: int) -> None:
        """Takes a descriptor, which stays the caller's; the thread starts with the first write."""
        self._fd = fd
        self._jobs: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.error: OSError | None = None
        # Whoever has the next piece waits here before reading it: a hundred followers hold no hundred pieces.
        self.turn = asyncio.Semaphore(_TURNS)

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
            while rest and self.error is None:
                try:
                    rest = rest[os.write(self._fd, rest) :]
                except BlockingIOError:
                    # Somebody else made the stream non-blocking.
                    _wait_writable(self._fd)
                except OSError as error:
                    self.error = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
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
        """Takes the two descriptors, which stay the caller's."""
        self._outputs = {Streams.STDOUT: OutputThread(stdout), Streams.STDERR: OutputThread(stderr)}
        self._watch = FileWatch()
        self._followers: list[Follower] = []

    def follow(self, copy: ConsoleCopy) -> Follower:
        """Makes the follower of one stream; not started yet."""
        self._followers = [follower for follower in self._followers if not follower.done]
        follower = Follower(copy.path, self._outputs[copy.stream], self._watch, copy.prefix)
        self._followers.append(follower)
        for oldest in self._followers[:-MOST_FOLLOWERS]:
            oldest.cancel()
        return follower

    async def close(self, timeout: float) -> bool:
        """Finishes all followers and the writing, within about `timeout` seconds.

        Returns:
            False if bytes were left out; the log says how many, and which files have them.
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
