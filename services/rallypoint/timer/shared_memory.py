"""Memory that a process can give another one a look into."""

from __future__ import annotations

import fcntl
import mmap
import os

# F_ADD_SEALS and F_SEAL_* of Linux, which not every build of Python has names for.
_ADD_SEALS, _SEAL, _SHRINK, _GROW = 1033, 0x1, 0x2, 0x4


class SharedMemory:
    """Some zeros, in memory that any process can map that is sent the descriptor. It can't change its size."""

    def __init__(self, size: int) -> None:
        """Makes it.

        Args:
            size: bytes. Only those that are written to take memory.

        Raises:
            OSError: there is none to be had, or this kernel doesn't share memory so.
        """
        self.descriptor = -1
        try:
            self.descriptor = os.memfd_create("rallypoint-timers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self.descriptor, size)
            # Else whoever maps it could be killed by its owner, who makes it shorter.
            fcntl.fcntl(self.descriptor, _ADD_SEALS, _SEAL | _SHRINK | _GROW)
            self.memory = memoryview(mmap.mmap(self.descriptor, size))
        except (AttributeError, ValueError) as error:
            raise OSError(f"this Python can't share memory: {error}") from error

    def close(self) -> None:
        """Lets go of the descriptor. The memory stays for as long as somebody refers to it."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def private_memory(size: int) -> memoryview:
    """So many zeros that no other process sees, not even a forked one. Those not written to take no memory."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
