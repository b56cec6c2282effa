"""Memory that a process can give another one a look into."""

from __future__ import annotations

import fcntl
import mmap
import os

from rallypoint.timer.own_file import OwnFile

# F_ADD_SEALS and F_SEAL_* of Linux, which not every build of Python has names for.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 0x1, 0x2, 0x4

# Memory whose descriptors the program has closed. A map closes one of its own when it is freed, which would be
# another file's by now.
_never_freed: list[memoryview] = []


class SharedMemory:
    """Some zeros, in memory that any process can map that is sent the descriptor. It can't change its size."""

    def __init__(self, size: int) -> None:
        """Makes it.

        Args:
            size: bytes. Only those that are written to take memory.

        Raises:
            OSError: there is none to be had, or this kernel doesn't share memory so.
        """
        self._descriptor = -1
        # None until all is made: a signal handler that raises may come in between.
        self._file: OwnFile | None = None
        try:
            self._descriptor = os.memfd_create("rallypoint-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._descriptor, size)
            # Else whoever maps it could be killed by its owner, who makes it shorter.
            fcntl.fcntl(self._descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.memory = memoryview(mmap.mmap(self._descriptor, size))
            self._file = OwnFile(self._descriptor)
        except (AttributeError, ValueError) as error:
            raise OSError(f"this Python can't share memory: {error}") from error

    @property
    def descriptor(self) -> int:
        """What another process can map it by; -1 once that is closed, be it by the program."""
        descriptor = self._descriptor
        return descriptor if self._file is None or self._file.is_behind(descriptor) else -1

    def close(self) -> None:
        """Lets go of the descriptor. The memory stays for as long as somebody refers to it."""
        descriptor = self.descriptor
        if descriptor >= 0:
            os.close(descriptor)
        elif self._descriptor >= 0:
            _never_freed.append(self.memory)
        self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def private_memory(size: int) -> memoryview:
    """So many zeros that no other process sees, not even a forked one. Those not written to take no memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
