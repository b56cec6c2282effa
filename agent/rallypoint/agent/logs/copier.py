"""The log copier: the small process that moves workers' output from pipes into files that it rotates by size.

The agent runs this file as a program of its own, `python -I -S copier.py`, where logs are rotated. (Where they
are not, workers write into their files themselves, and there is no copier.) It is a process and not a part of the
agent because it must outlive it: when the agent is killed, its workers are, and what they wrote last is still in
the pipes. It ends by itself when nobody can write any more.

It keeps nothing in its memory that counts: bytes go from pipe to file in one system call, and where a file begins in
its stream is said by the names of those before it (see rallypoint.agent.logs.files). So it can be killed at any moment
and another one goes on where it was, with the same pipes, which the agent holds open.

Standard input, lines of JSON: the first is what to do, {"max_bytes", "keep_files", "streams": [{"fd", "path"}]}; then
{"flush": n, "stream": i} asks to be told when what that pipe holds by now is in its file. Its end says that no new
writer will come: what has none is finished, and the process ends when all are.

Standard output: {"flushed": n}; {"stream": i, "lost": bytes, "error": text} when bytes could not be written and were
dropped, once when that begins and once when it is over. Dropped, because a worker must not stand still for want of
disk space; where bytes are missing, the file says so.
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
"""Bytes moved for one stream before the others have their turn; a pipe holds less as a rule."""

LONGEST_LINE = 1 << 20
"""Bytes past the size at which a file is rotated that a line may go on, before it is cut."""

LARGEST_SHARE = 0.2
"""Of a processor that copying may use while all pipes are nearly empty: a worker that writes line by line would else
wake us for each line. A pipe that fills up is served at once."""

LONGEST_PAUSE = 0.01
"""Seconds, of which whoever reads the files sees nothing."""

_FILLING = 32 * 1024  # bytes: half of the smallest usual pipe
_FIONREAD = 0x541B
_NONBLOCK = 2  # SPLICE_F_NONBLOCK
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_DIGITS = 15


def bytes_to_move(ahead: bytes, room: int, in_line: bool, over: int) -> int:
    """Decides how much goes into a file before it is rotated.

    Args:
        ahead: what comes next; more than there is room for.
        room: bytes until the size at which the file is to be rotated; less than nothing if it is past that.
        in_line: whether the line that comes belongs into the file: its beginning is there, or nothing is.
        over: how far past that size a line may go on.

    Returns:
        Bytes to move, then rotate; as many as there are: move all, and don't rotate yet, since a line goes on.
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
        self, number: int, fd: int, path: str, news: _AgentNotifier, *, max_bytes: int, keep_files: int
    ) -> None:
        self.number = number
        self.fd = fd
        self._path = path
        self._max_bytes = max_bytes
        self._keep_files = keep_files
        self._notifier = news
        self._lost = 0
        self._can_splice = True
        self._open()

    # -- the file

    def _open(self) -> None:
        """Opens the file being written, and finds its place in the stream."""
        rotated = self._rotated()
        begin = 0
        if rotated:
            last = os.stat(self._name(rotated[-1]))
            begin = rotated[-1] + last.st_size
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(last, os.stat(self._path)):
                    self._begin_file()  # a copier before us died in the middle of a rotation
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
        """Puts an empty file in the place of the one being written, which has another name by now."""
        fresh = f"{self._path}.new"
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666))
        os.replace(fresh, self._path)

    def _rotate(self) -> None:
        name = self._name(self._begin)
        try:
            try:
                os.link(self._path, name)  # so that at no moment there is no file of the well-known name
            except OSError:
                os.rename(self._path, name)  # a file system without links
            self._begin_file()
            fresh = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return  # no room for another file: this one goes on, and it is tried again
        os.close(self._file)
        self._file, self._begin, self._size = fresh, self._begin + self._size, 0
        for begin in self._rotated()[: -self._keep_files]:
            with contextlib.suppress(OSError):
                os.unlink(self._name(begin))

    # -- the bytes

    def waiting(self) -> int:
        """Bytes in the pipe."""
        answer = bytearray(4)
        fcntl.ioctl(self.fd, _FIONREAD, answer)
        return int.from_bytes(answer, sys.byteorder)

    def move(self, most: int) -> int:
        """Moves up to so many bytes of those that are there; returns how many, 0 when there are none."""
        present = min(self.waiting(), most)
        if present == 0:
            return 0
        size = os.fstat(self._file).st_size
        self._size = min(self._size, size)  # somebody has emptied it
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
                return self._write(present)  # it could not be rotated
        return moved or self.move(most)

    def _peek(self, count: int) -> bytes:
        """What is next in the pipe, without taking it out."""
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
        """Moves bytes into the file; those that can't be written are dropped."""
        try:
            if self._lost:
                self._confess()
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
                self._can_splice = False  # a file system that has no such thing
        # Killed between the two, we lose a piece.
        data = os.read(self.fd, count)
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, data[written:], self._size + written)
        return written

    def _confess(self) -> None:
        """Says in the file that bytes are missing; raises OSError if there is no place even for that."""
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
        """Whether the pipe is empty and has no writer; what comes meanwhile is moved."""
        try:
            moved = self._splice(MOST_AT_ONCE)
        except OSError:
            return False  # empty, and somebody may write; or there is something, and no place for it
        self._size += moved
        return moved == 0

    def close(self) -> None:
        """When no more can come."""
        if self._lost:
            with contextlib.suppress(OSError):
                self._confess()
        if self._lost:
            self._notifier.notify(stream=self.number, lost=self._lost, error="")
        os.close(self._file)
        os.close(self.fd)


@cache
def _libc() -> Any:
    import ctypes  # noqa: PLC0415  # takes longer than all the rest, and is not needed before the first rotation

    return ctypes.CDLL(None, use_errno=True)


class _AgentNotifier:
    """Tells the agent; an agent that is gone, or doesn't listen, is no reason to wait."""

    def __init__(self) -> None:
        os.set_blocking(1, False)

    def notify(self, **news: Any) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(news).encode() + b"\n")


class _CopierLoop:
    """The loop of the process."""

    def __init__(self, orders: bytes, inbox: bytes) -> None:
        task = json.loads(orders)
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
        self._flushes: list[tuple[int, _PipeCopy, int]] = []  # number, whose, bytes yet to move

    def run(self) -> None:
        """Moves until nobody can write any more."""
        self._obey()
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
            self._end(stream)  # all writers are gone, and nobody but they could have let in new ones
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
                # A pipe that never had a writer doesn't say so by itself.
                while stream.move(MOST_AT_ONCE):
                    pass
                if stream.ended():
                    self._end(stream)
            return
        self._inbox += data
        self._obey()

    def _obey(self) -> None:
        """Takes up all whole lines that were heard."""
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
    """Does what standard input says."""
    # Ctrl-C and the scheduler's signals may hit everything at once; our end is that of the workers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    heard = b""
    while b"\n" not in heard:
        data = os.read(0, 1 << 16)
        if not data:
            return
        heard += data
    orders, _, inbox = heard.partition(b"\n")
    _CopierLoop(orders, inbox).run()


if __name__ == "__main__":
    main()
