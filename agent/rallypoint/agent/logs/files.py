"""One stream of one worker as one sequence of bytes, whether or not its file is rotated.

    stdout.log                    the file being written
    stdout.log.000000104857600    rotated; the number is the count of bytes of the stream before this file

The names sort in the order of writing, so `cat stdout.log.* stdout.log` prints the whole stream. A position is a number
of bytes from the beginning of the stream; it stays valid when files are rotated or the oldest are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DIGITS = 15
"""Digits of the number in a rotated file's name: enough for a petabyte, and the same for all, so that names sort."""

_ATTEMPTS = 10  # if so many rotations overtake a reader while it opens the stream, it cannot keep up


class Segment(NamedTuple):
    """A file that holds a part of a stream: the position of its first byte, and its path."""

    begin: int
    path: Path


def rotated_name(path: Path, begin: int) -> Path:
    """Return the new name of the file at `path` when it is rotated, if its first byte is at `begin`."""
    return path.with_name(f"{path.name}.{begin:0{DIGITS}}")


def rotated_files(path: Path) -> list[Segment]:
    """Return the rotated files of `path` that still exist, the oldest first."""
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
    """Return the last bytes of a stream, at most `size`, from rotated files too.

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
    """The result of a read: position and bytes; no bytes: the end of the stream so far."""

    begin: int
    data: bytes

    @property
    def end(self) -> int:
        """Position of the next piece."""
        return self.begin + len(self.data)


class LogFile:
    """Reads a stream that may grow and be rotated meanwhile. Keeps one file open."""

    def __init__(self, path: Path) -> None:
        """`path`: the file being written; the first use opens it."""
        self.path = path
        self._fd = -1
        self._begin = 0

    def __enter__(self) -> LogFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open file; may be called again, and the next read opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fileno(self) -> int:
        """Return the descriptor of the file that was read last, to watch it for growth; at first, of the oldest file.

        Raises:
            OSError: it can't be opened.
        """
        if self._fd < 0:
            self._open(0)
        return self._fd

    def extent(self) -> tuple[int, int]:
        """Return the positions of the first byte that still exists, and of the end.

        Raises:
            OSError: there is no such stream, or it can't be read.
        """
        rotated = self._open_current()
        return rotated[0].begin if rotated else self._begin, self._begin + os.fstat(self._fd).st_size

    def read(self, offset: int, size: int) -> Piece:
        """Read at a position.

        Args:
            offset: the position.
            size: most bytes to read; the end of a file may shorten the piece.

        Returns:
            The piece. It begins after `offset` if those bytes were removed with the oldest files; before it, with no
            bytes, if the file was truncated: new output continues from there.

        Raises:
            OSError: the stream can't be read.
        """
        if self._fd < 0 or offset < self._begin:
            self._open(offset)
        offset = max(offset, self._begin)
        data = os.pread(self._fd, size, offset - self._begin)
        if not data and self._replaced():
            # It was rotated, perhaps with more bytes written between the read and the rotation.
            data = os.pread(self._fd, size, offset - self._begin)
            if not data:
                self._open(offset)
                offset = max(offset, self._begin)
                data = os.pread(self._fd, size, offset - self._begin)
        if not data and offset > self._begin + os.fstat(self._fd).st_size:
            return Piece(self._begin, b"")
        return Piece(offset, data)

    def _replaced(self) -> bool:
        """True if the open file is no longer the one being written."""
        try:
            return not os.path.samestat(os.stat(self.path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def _open(self, offset: int) -> None:
        """Open the file that has this position; if it was removed, the next; if not written yet, the newest."""
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
        """Open the file being written and find its position; return the files rotated before it."""
        for _ in range(_ATTEMPTS):
            before = rotated_files(self.path)
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            # A rotation between the two listings would give the new file the old file's position.
            if rotated_files(self.path) == before and (begin := _begin_of(fd, before)) is not None:
                self.close()
                self._fd, self._begin = fd, begin
                return before
            os.close(fd)
        raise FileNotFoundError(f"{self.path} is rotated faster than it can be read")


def _begin_of(fd: int, rotated: Sequence[Segment]) -> int | None:
    """Return the position of the first byte of an open file after these; None if the last of them is gone."""
    if not rotated:
        return 0
    begin, path = rotated[-1]
    try:
        last = os.stat(path)
    except FileNotFoundError:
        return None
    # In the middle of a rotation, the file being written has both names.
    return begin if os.path.samestat(last, os.fstat(fd)) else begin + last.st_size
