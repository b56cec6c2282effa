"""Tells whether a descriptor number is still of the file that it was opened for.

A program may close all descriptors that it does not know, as those do that make a daemon of themselves; the next
file that it opens gets the number. Writing to it, or closing it, would harm a file that is none of ours.
"""

from __future__ import annotations

import os


class OwnFile:
    """An open file, by what the kernel calls it."""

    __slots__ = ("_file",)

    def __init__(self, descriptor: int) -> None:
        """Takes note of the file that the descriptor is of.

        Raises:
            OSError: it is of none.
        """
        self._file = _file_of(descriptor)

    def is_behind(self, descriptor: int) -> bool:
        """Whether the descriptor is of that file now."""
        try:
            return _file_of(descriptor) == self._file
        except OSError:
            return False


def _file_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
