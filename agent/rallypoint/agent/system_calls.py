"""Names of the system calls in which a thread may wait for long, by the numbers of the machine at hand."""

from __future__ import annotations

import os

# From the kernel's own tables, unistd_64.h of each architecture.
_TABLES = {
    "x86_64": """
        0 read 1 write 7 poll 16 ioctl 17 pread64 18 pwrite64 19 readv 20 writev 23 select 34 pause 35 nanosleep
        42 connect 43 accept 44 sendto 45 recvfrom 46 sendmsg 47 recvmsg 61 wait4 72 fcntl 73 flock 74 fsync
        75 fdatasync 76 truncate 77 ftruncate 82 rename 83 mkdir 87 unlink 128 rt_sigtimedwait 130 rt_sigsuspend
        202 futex 230 clock_nanosleep 232 epoll_wait 247 waitid 257 openat 262 newfstatat 263 unlinkat
        264 renameat 270 pselect6 271 ppoll 281 epoll_pwait 288 accept4 441 epoll_pwait2
    """,
    "aarch64": """
        22 epoll_pwait 25 fcntl 29 ioctl 32 flock 34 mkdirat 35 unlinkat 38 renameat 45 truncate 46 ftruncate
        56 openat 63 read 64 write 65 readv 66 writev 67 pread64 68 pwrite64 72 pselect6 73 ppoll 79 newfstatat
        82 fsync 83 fdatasync 95 waitid 98 futex 101 nanosleep 115 clock_nanosleep 133 rt_sigsuspend
        137 rt_sigtimedwait 202 accept 203 connect 206 sendto 207 recvfrom 211 sendmsg 212 recvmsg 242 accept4
        260 wait4 441 epoll_pwait2
    """,
}

_WITH_DESCRIPTOR = """
    read write readv writev pread64 pwrite64 ioctl fsync fdatasync ftruncate flock fcntl accept accept4 connect sendto
    recvfrom sendmsg recvmsg
"""
TAKE_DESCRIPTOR = frozenset(_WITH_DESCRIPTOR.split())
"""Those whose first argument is a file descriptor."""


def _names(table: str) -> dict[int, str]:
    words = table.split()
    return {int(number): name for number, name in zip(words[::2], words[1::2], strict=True)}


_NAMES = _names(_TABLES.get(os.uname().machine, ""))


def name_of(number: int) -> str:
    """The name of a system call; `number N` if it isn't one of those."""
    return _NAMES.get(number, f"number {number}")
