"""Watches files for growth with inotify, without polling."""

from __future__ import annotations

import asyncio
import ctypes
import os
import struct
from collections.abc import Callable

FALLBACK_INTERVAL = 0.2
"""Seconds between reads of a file that inotify can't watch: the kernel allows a user 128 inotify instances by default,
and the containers of a host share them."""

_IN_MODIFY = 0x2
_IN_ATTRIB = 0x4  # a name was added or removed: the file is being rotated
_IN_MOVE_SELF = 0x800
_IN_Q_OVERFLOW = 0x4000
_IN_ONESHOT = 0x80000000
_EVENT = struct.Struct("iIII")


class FileWatch:
    """Calls back, once, when a file is written to, or renamed. Needs a running loop."""

    def __init__(self) -> None:
        """Open inotify; if the kernel refuses, `arm` returns False."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        # Several callbacks may watch one file, and the kernel gives them one handle.
        self._armed: dict[int, list[Callable[[], None]]] = {}
        if self._fd >= 0:
            asyncio.get_running_loop().add_reader(self._fd, self._read)

    def arm(self, fd: int, callback: Callable[[], None]) -> bool:
        """Call `callback` once, at the next write to the open file `fd`; arm again after it.

        One event per arming, not one per write: a worker that writes a million lines a second must not cause a
        million events. Arming twice has no further effect.

        Returns:
            False if the file can't be watched (inotify's limits are used up).
        """
        if self._fd < 0:
            return False
        # By descriptor: the file may have been renamed, and a network file system needs no lookup.
        path = f"/proc/self/fd/{fd}".encode()
        mask = _IN_MODIFY | _IN_ATTRIB | _IN_MOVE_SELF | _IN_ONESHOT
        handle: int = self._libc.inotify_add_watch(self._fd, path, mask)
        if handle < 0:
            return False
        callbacks = self._armed.setdefault(handle, [])
        if callback not in callbacks:
            callbacks.append(callback)
        return True

    def disarm(self, callback: Callable[[], None]) -> None:
        """End all watches with this callback."""
        for handle in [handle for handle, callbacks in self._armed.items() if callback in callbacks]:
            self._armed[handle].remove(callback)
            if not self._armed[handle]:
                del self._armed[handle]
                self._libc.inotify_rm_watch(self._fd, handle)

    def close(self) -> None:
        """End all watches."""
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
            for callbacks in [self._armed.pop(handle) for handle in grown if handle in self._armed]:
                for callback in callbacks:
                    callback()
