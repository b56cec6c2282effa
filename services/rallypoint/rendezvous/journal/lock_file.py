"""One process at a time: a lock that goes with the process, and a number that outlives it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from zlib import crc32


class LockFile:
    """A file that is locked for as long as it is held, and holds a number.

    The number is written without a sync: it survives the process, and may be an older one after loss of power.
    """

    def __init__(self, path: Path) -> None:
        """`path`: the file; made where it is missing, and never removed.

        To unlink it would let a third process lock a file that is no longer there.

        Raises:
            BlockingIOError: Another process holds it.
            OSError: It can't be made.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._file)
            raise

    def read(self) -> int:
        """The number; 0 where there is none, or none that can be trusted."""
        content = os.pread(self._file, 64, 0)
        number = content[:20]
        return int(number) if number.isdigit() and content == _content(int(number)) else 0

    def write(self, number: int) -> None:
        """Put the number in place of the one before.

        Raises:
            OSError: It could not be written.
        """
        os.pwrite(self._file, _content(number), 0)

    def release(self) -> None:
        """Let the next process have it."""
        os.close(self._file)


def _content(number: int) -> bytes:
    digits = b"%020d" % number
    return b"%b %08x\n" % (digits, crc32(digits))
