"""An open connection of a worker process to its agent's timer socket."""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct
import termios

from rallypoint.timer.own_file import OwnFile

# A socket's queue is bounded by bytes, overhead included. This is the most that an unprivileged process gets by
# default; the kernel doubles it. It holds some 500 messages, so an agent may look away for a while.
_SEND_BUFFER = 212_992
_INT = struct.Struct("@i")


class Link:
    """A connection. It is closed when the last thread lets go of it.

    Closing it earlier could hand its descriptor number to another file while a thread is about to send on it. If
    the program closed it, and with it perhaps gave its number away, it is gone.
    """

    __slots__ = ("_file", "_socket", "opened_at")

    def __init__(self, path: str, patience: float, opened_at: int) -> None:
        """Connects.

        Args:
            path: the agent's socket.
            patience: most seconds to wait, now and whenever something is sent.
            opened_at: now, by whatever clock the caller goes by.

        Raises:
            OSError: nobody listens there.
            ValueError: nobody can: the path has a zero byte.
        """
        self.opened_at = opened_at
        self._socket = connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._file = OwnFile(connected.fileno())
        # The kernel bounds how long connecting and sending wait; that costs no further system call.
        seconds, fraction = divmod(patience, 1)
        limit = struct.pack("@ll", int(seconds), int(fraction * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        connected.connect(path)

    def send(self, message: bytes, descriptor: int = -1) -> None:
        """Sends a message, with a descriptor if it is not negative.

        Raises:
            BlockingIOError: the agent did not read for as long as may be waited.
            OSError: it is gone.
        """
        if not self._is_open():
            raise OSError(errno.EBADF, "the program has closed the connection")
        if descriptor < 0:
            self._socket.send(message, socket.MSG_NOSIGNAL)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            self._socket.sendmsg([message], [rights], socket.MSG_NOSIGNAL)

    def has_unread(self) -> bool:
        """Whether a message waits that the agent has not read. False if the kernel doesn't say."""
        if not self._is_open():
            return False
        try:
            waiting = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(_INT.size))
        except OSError:
            return False
        return bool(_INT.unpack(waiting)[0])

    def shut(self) -> None:
        """Tells the agent that this is the end, whoever else holds the connection."""
        if not self._is_open():
            return
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The agent was first.
            return

    def close(self) -> None:
        """Lets go of the descriptor and leaves the connection to whoever else holds it."""
        if self._is_open():
            self._socket.close()
        else:
            self._socket.detach()

    def __del__(self) -> None:
        # Not there if no socket could be had.
        if getattr(self, "_file", None) is not None:
            self.close()

    def _is_open(self) -> bool:
        return self._file.is_behind(self._socket.fileno())
