"""One stream of one worker as one sequence of bytes, whether or not its file is rotated.

    stdout.log                    the file being written
    stdout.log.000000104857600    rotated away; its name says how many bytes of the stream come before it

The names sort in the order of writing, so `cat stdout.log.* stdout.log` is all there is. A place in the stream is a
number of bytes from its beginning and stays valid when files are rotated, or the oldest of them removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DIGITS = 15
"""Of the number in a rotated file's name: enough for a petabyte, and the same for all, so that names sort."""

_ATTEMPTS = 10  # a reader that is overtaken by that many rotations while it looks for its place has no chance


class Segment(NamedTuple):
    """A file that holds a part of a stream: its first byte's place, and where it is."""

    begin: int
    path: Path


def rotated_name(path: Path, begin: int) -> Path:
    """Where the file at `path` goes when it is rotated, if its first byte is at `begin`."""
    return path.with_name(f"{path.name}.{begin:0{DIGITS}}")


def rotated_files(path: Path) -> list[Segment]:
    """The files that were rotated away from `path` and are there yet, the oldest first."""
    pattern = re.compile(re.escape(path.name) + rf"\.(\d{{{DIGITS}}})")
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return []
    found = [
        Segment(int(match[1]), path.with_name(name)) for name in names if (match := pattern.fullmatch(name))
    ]
    return sorted(found)


def read_end(path: Path, size: int) -> bytes:
    """The last bytes of a stream, at most `size`, over rotated files too.

    Raises:
        OSError: there is no such stream, or it can't be read.
    """
    with LogFile(path) as file:
        begin, end = file.extent()
        offset, pieces = max(begin, end - size), []
        while offset < end:
            piece = file.read(offset, end - offset)
            if not piece.data:
                break
            offset = piece.end
            pieces.append(piece.data)
    return b"".join(pieces)[-size:]


class Piece(NamedTuple):
    """What was read: where it begins, and the bytes; none: that is the end so far."""

    begin: int
    data: bytes

    @property
    def end(self) -> int:
        """Where the next piece begins."""
        return self.begin + len(self.data)


class LogFile:
    """Reads a stream that may be growing, and rotated meanwhile. Keeps one file open."""

    def __init__(self, path: Path) -> None:
        """Takes the path of the file being written; it is opened by the first use."""
        self.path = path
        self._fd = -1
        self._begin = 0

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes what is open; may be called again, and reading goes on after it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fileno(self) -> int:
        """The file that was read last, to be watched for growth; the first one's before that.

        Raises:
            OSError: it can't be opened.
        """
        if self._fd < 0:
            self._open(0)
        return self._fd

    def extent(self) -> tuple[int, int]:
        """Places of the first byte that is there yet, and of the end.

        Raises:
            OSError: there is no such stream, or it can't be read.
        """
        rotated = self._open_current()
        return rotated[0].begin if rotated else self._begin, self._begin + os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> Piece:
        """Reads at a place.

        Args:
            offset: the place.
            size: most bytes to read; fewer come where a file ends.

        Returns:
            The piece. It begins later than asked if the bytes there are gone with the oldest files; sooner, with
            no bytes, if the file was emptied: then what comes is new from there.

        Raises:
            OSError: the stream can't be read.
        """
        if self._fd < 0 or offset < self._begin:
            self._open(offset)
        offset = max(offset, self._begin)
        data = os.pread(self._fd, size, offset - self._begin)
        if not data and self._replaced():
            # It was rotated, with what may have been written between the two.
            data = os.pread(self._fd, size, offset - self._begin)
            if not data:
                self._open(offset)
                offset = max(offset, self._begin)
                data = os.pread(self._fd, size, offset - self._begin)
        if not data and offset > self._begin + os.fstat(self._fd).st_size:
            return Piece(self._begin, b"")
        return Piece(offset, data)

    def _replaced(self) -> bool:
        """Whether the file that is open is no longer the one being written."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _open(self, offset: int) -> None:
        """Opens the file that has this place; if it is gone, the next; if it is yet to come, the newest."""
        rotated = self._open_current()
        following = [segment.begin for segment in rotated[1:]]
        for segment, end in zip(rotated, [*following, self._begin], strict=False):
            if offset >= end:
                continue
            with contextlib.suppress(FileNotFoundError):  # removed since
                fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
                if offset < segment.begin + os.fstat(fd).st_size:
                    self.close()
                    self._fd, self._begin = fd, segment.begin
                    return
                os.close(fd)

    def _open_current(self) -> list[Segment]:
        """Opens the file being written, with its place; returns those rotated before it."""
        for _ in range(_ATTEMPTS):
            before = rotated_files(self.path)
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            # A rotation between the two looks would give the new file the old one's place.
            if rotated_files(self.path) == before and (begin := _begin_of(fd, before)) is not None:
                self.close()
                self._fd, self._begin = fd, begin
                return before
            os.close(fd)
        raise FileNotFoundError(f"{self.path} is rotated faster than it can be read")


def _begin_of(fd: int, rotated: Sequence[Segment]) -> int | None:
    """The place of the first byte of an open file that follows these; None if the last of them is gone."""
    if not rotated:
        return 0
    begin, path = rotated[-1]
    try:
        last = os.stat(path)
    except FileNotFoundError:
        return None
    # In the middle of a rotation, the file being written has both names.
    return begin if os.path.samestat(last, os.fstat(fd)) else begin + last.st_size
