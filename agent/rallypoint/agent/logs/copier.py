"""The log copier: the small process that moves workers' output from pipes into files that it rotates by size.

The agent runs this file as a separate program, `python -I -S copier.py`, if logs are rotated. (If they are not,
workers write into their files directly, and there is no copier.) It is a process of its own because it must outlive
the agent: a killed agent's workers are killed too, with their last output still in the pipes. It ends when no writer is
left.

It keeps no state in memory: bytes go from pipe to file in one system call, and the names of the rotated files give the
position of each file in its stream (see rallypoint.agent.logs.files). So it can be killed at any moment, and another
copier continues with the same pipes, which the agent holds open.

Standard input, lines of JSON. The first is the configuration, {"max_bytes", "keep_files", "streams": [{"fd", "path"}]};
then {"flush": n, "stream": i} requests a reply when the present content of that pipe is in its file. End of file means
that no new writer will come: a pipe without a writer is finished, and the process ends when all are.

Standard output: {"flushed": n}; {"stream": i, "lost": bytes, "error": text} when bytes could not be written and were
dropped, once at the start and once at the end of the loss. They are dropped because a full disk must not block a
worker; the file has a note where bytes are missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import signal
import sys
import time
from functools import cache
from typing import Any

MOST_AT_ONCE = 1 << 20
"""Bytes moved for one stream before the next stream is served; a pipe usually holds less."""

LONGEST_LINE = 1 << 20
"""Bytes by which a line may exceed the size at which a file is rotated, before it is cut."""

LARGEST_SHARE = 0.2
"""Share of one processor for copying while all pipes are nearly empty: without this limit, a worker that writes line
by line would wake the copier for each line. A pipe that fills up is served at once."""

LONGEST_PAUSE = 0.01
"""Seconds; too short for a reader of the files to notice."""

_FILLING = 32 * 1024  # bytes: half of the smallest usual pipe
_FIONREAD = 0x541B
_NONBLOCK = 2  # SPLICE_F_NONBLOCK
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_DIGITS = 15


def bytes_to_move(ahead: bytes, room: int, in_line: bool, over: int) -> int:
    """Return how many bytes go into a file before it is rotated.

    Args:
        ahead: the next bytes of the stream; more than `room`.
        room: bytes until the size at which the file is rotated; negative if it is past that.
        in_line: true if the next line belongs into the file: its beginning is there, or the file is empty.
        over: bytes past that size up to which a line may go on.

    Returns:
        The bytes to move before rotating; `len(ahead)`: move all and do not rotate yet, because a line goes on.
    """
    end = ahead.rfind(b"\n", 0, max(0, room)) + 1
    if end or not in_line:
        return end
    end = ahead.find(b"\n") + 1
    allowed = max(0, room + over)
    return min(end or len(ahead), allowed)


class _PipeCopy:
    """One pipe, and the file it goes into."""

    def __init__(
        self, number: int, fd: int, path: str, notifier: _AgentNotifier, *, max_bytes: int, keep_files: int
    ) -> None:
        self.number = number
        self.fd = fd
        self._path = path
        self._max_bytes = max_bytes
        self._keep_files = keep_files
        self._notifier = notifier
        self._lost = 0
        self._can_splice = True
        self._open()

    # -- the file

    def _open(self) -> None:
        """Open the file being written, and find its position in the stream."""
        rotated = self._rotated()
        begin = 0
        if rotated:
            last = os.stat(self._name(rotated[-1]))
            begin = rotated[-1] + last.st_size
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(last, os.stat(self._path)):
                    self._begin_file()  # an earlier copier died in the middle of a rotation
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._size = os.fstat(self._file).st_size
        self._begin = begin

    def _rotated(self) -> list[int]:
        folder, name = os.path.split(self._path)
        suffixes = [other[len(name) + 1 :] for other in os.listdir(folder) if other.startswith(name + ".")]
        return sorted(int(suffix) for suffix in suffixes if len(suffix) == _DIGITS and suffix.isdecimal())

    def _name(self, begin: int) -> str:
        return f"{self._path}.{begin:0{_DIGITS}}"

    def _begin_file(self) -> None:
        """Replace the file being written, which already has its rotated name too, by an empty one."""
        fresh = f"{self._path}.new"
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        os.replace(fresh, self._path)

    def _rotate(self) -> None:
        name = self._name(self._begin)
        try:
            try:
                os.link(self._path, name)  # link, not rename: a file with the well-known name always exists
            except OSError:
                os.rename(self._path, name)  # a file system without links
            self._begin_file()
            fresh = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # no space for another file: continue with this one, and try again later
        os.close(self._file)
        self._file, self._begin, self._size = fresh, self._begin + self._size, 0
        for begin in self._rotated()[: -self._keep_files]:
            with contextlib.suppress(OSError):
                os.unlink(self._name(begin))

    # -- the bytes

    def waiting(self) -> int:
        """Bytes in the pipe."""
        count = bytearray(4)
        fcntl.ioctl(self.fd, _FIONREAD, count)
        return int.from_bytes(count, sys.byteorder)

    def move(self, most: int) -> int:
        """Move at most `most` bytes; return the number of bytes moved, 0 if the pipe is empty."""
        present = min(self.waiting(), most)
        if present == 0:
            return 0
        size = os.fstat(self._file).st_size
        self._size = min(self._size, size)  # another process may have truncated it
        room = self._max_bytes - self._size
        if present <= room:
            return self._write(present)
        ahead = self._peek(present)
        if len(ahead) <= room or not ahead:
            return self._write(len(ahead) or present)
        count = bytes_to_move(ahead, room, self._size == 0 or self._in_line(), LONGEST_LINE)
        moved = self._write(count) if count else 0
        if moved == count < len(ahead):
            before = self._begin
            self._rotate()
            if moved == 0 and self._begin == before:
                return self._write(present)  # rotation failed
        return moved or self.move(most)

    def _peek(self, count: int) -> bytes:
        """Return the next bytes in the pipe without removing them."""
        read, write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            with contextlib.suppress(OSError):
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, count)
            if _libc().tee(self.fd, write, count, _NONBLOCK) <= 0:
                return b""
            return os.read(read, count)
        finally:
            os.close(read)
            os.close(write)

    def _in_line(self) -> bool:
        return os.pread(self._file, 1, self._size - 1) != b"\n"

    def _write(self, count: int) -> int:
        """Move bytes into the file; bytes that can't be written are dropped."""
        try:
            if self._lost:
                self._note_missing_bytes()
            moved = self._splice(count)
        except OSError as error:
            if error.errno == errno.EAGAIN:
                return 0
            if error.errno not in _NO_SPACE:
                raise
            dropped = len(os.read(self.fd, count))
            if not self._lost:
                self._notifier.notify(stream=self.number, lost=dropped, error=os.strerror(error.errno))
            self._lost += dropped
            return dropped
        self._size += moved
        return moved

    def _splice(self, count: int) -> int:
        if self._can_splice:
            try:
                return os.splice(self.fd, self._file, count, offset_dst=self._size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._can_splice = False  # the file system does not support it
        # A copier killed between read and write loses this piece.
        data = os.read(self.fd, count)
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._size + written)
        return written

    def _note_missing_bytes(self) -> None:
        """Write a note about missing bytes into the file; raises OSError if there is no space even for that."""
        text = f"[rallypoint: {self._lost} bytes are missing here: they could not be written]\n".encode()
        if self._size and self._in_line():
            text = b"\n" + text
        if os.pwrite(self._file, text, self._size) < len(text):
            os.ftruncate(self._file, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(text)
        self._notifier.notify(stream=self.number, lost=self._lost, error="")
        self._lost = 0

    def ended(self) -> bool:
        """Move bytes that are there; true if the pipe is empty and has no writer."""
        try:
            moved = self._splice(MOST_AT_ONCE)
        except OSError:
            return False  # either the pipe is empty and has a writer, or there is no space for its bytes
        self._size += moved
        return moved == 0

    def close(self) -> None:
        """Close file and pipe; called when no writer is left."""
        if self._lost:
            with contextlib.suppress(OSError):
                self._note_missing_bytes()
        if self._lost:
            self._notifier.notify(stream=self.number, lost=self._lost, error="")
        os.close(self._file)
        os.close(self.fd)


@cache
def _libc() -> Any:
    import ctypes  # noqa: PLC0415  # slower than all other imports, and not needed before the first rotation

    return ctypes.CDLL(None, use_errno=True)


class _AgentNotifier:
    """Sends events to the agent; never waits for an agent that is gone or does not read."""

    def __init__(self) -> None:
        os.set_blocking(1, False)

    def notify(self, **event: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(event).encode() + b"\n")


class _CopierLoop:
    """The loop of the process."""

    def __init__(self, configuration: bytes, inbox: bytes) -> None:
        task = json.loads(configuration)
        self._notifier = _AgentNotifier()
        self._inbox = inbox
        self._agent_lives = True
        self._agent_poll = select.poll()
        self._agent_poll.register(0, select.POLLIN)
        self._poll = select.epoll()
        self._poll.register(0, select.EPOLLIN)
        self._streams: dict[int, _PipeCopy] = {}
        self._by_number: dict[int, _PipeCopy] = {}
        for number, stream in enumerate(task["streams"]):
            made = _PipeCopy(
                number,
                stream["fd"],
                stream["path"],
                self._notifier,
                max_bytes=task["max_bytes"],
                keep_files=task["keep_files"],
            )
            self._streams[made.fd] = self._by_number[number] = made
            self._poll.register(made.fd, select.EPOLLIN)
        self._flushes: list[tuple[int, _PipeCopy, int]] = []  # number, pipe, bytes yet to move

    def run(self) -> None:
        """Move bytes until no writer is left."""
        self._handle_requests()
        while self._streams or self._agent_lives:
            ready = self._poll.poll()
            began, most = time.monotonic(), 0
            for fd, events in ready:
                if fd == 0:
                    self._receive()
                elif (stream := self._streams.get(fd)) is not None:
                    most = max(most, self._move(stream, hung_up=not events & select.EPOLLIN))
            if 0 < most < _FILLING and self._agent_lives and not self._flushes:
                spent = time.monotonic() - began
                self._agent_poll.poll(1000 * min(LONGEST_PAUSE, spent / LARGEST_SHARE))

    def _move(self, stream: _PipeCopy, *, hung_up: bool) -> int:
        moved = stream.move(MOST_AT_ONCE)
        if moved == 0 and hung_up:
            self._end(stream)  # all writers are gone, and only a writer can create another one
        self._credit(stream, moved)
        return moved

    def _end(self, stream: _PipeCopy) -> None:
        self._poll.unregister(stream.fd)
        del self._streams[stream.fd]
        stream.close()

    def _credit(self, stream: _PipeCopy, moved: int) -> None:
        rest = []
        for number, of, due in self._flushes:
            left = due - moved if of is stream else due
            if left > 0 and of.fd in self._streams:
                rest.append((number, of, left))
            else:
                self._notifier.notify(flushed=number)
        self._flushes = rest

    def _receive(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self._agent_lives = False
            self._poll.unregister(0)
            for stream in list(self._streams.values()):
                # A pipe that never had a writer causes no hang-up event.
                while stream.move(MOST_AT_ONCE):
                    pass
                if stream.ended():
                    self._end(stream)
            return
        self._inbox += data
        self._handle_requests()

    def _handle_requests(self) -> None:
        """Handle all complete lines received."""
        *lines, self._inbox = self._inbox.split(b"\n")
        for line in lines:
            request = json.loads(line)
            stream = self._by_number[request["stream"]]
            due = stream.waiting() if stream.fd in self._streams else 0
            if due:
                self._flushes.append((request["flush"], stream, due))
            else:
                self._notifier.notify(flushed=request["flush"])


def main() -> None:
    """Run the copier as configured on standard input."""
    # Ctrl-C and the scheduler's signals may reach all processes at once; the copier ends after its workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    received = b""
    while b"\n" not in received:
        data = os.read(0, 1 << 16)
        if not data:
            return
        received += data
    configuration, _, inbox = received.partition(b"\n")
    _CopierLoop(configuration, inbox).run()


if __name__ == "__main__":
    main()
