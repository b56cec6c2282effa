"""The kernel's view of a hung process: the state of each thread, and the resource that it waits for.

Read from /proc, without help of the process. Values that can't be read (of another user's process, or in a kernel built
without them) are left out. A read may block if the process holds a lock of the kernel: do it in a thread of its own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

# ---- Names of the system calls in which a thread may wait for long, by their numbers on this architecture.


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

# System calls whose first argument is a file descriptor.
_WITH_DESCRIPTOR = """
    read write readv writev pread64 pwrite64 ioctl fsync fdatasync ftruncate flock fcntl accept accept4 connect sendto
    recvfrom sendmsg recvmsg
"""
_TAKE_DESCRIPTOR = frozenset(_WITH_DESCRIPTOR.split())

_WORDS = _TABLES.get(os.uname().machine, "").split()
_NAMES = dict(zip(map(int, _WORDS[::2]), _WORDS[1::2], strict=True))

# ---- Processor time from /proc: one function for the start of a timer and for its expiry.


_TICKS = os.sysconf("SC_CLK_TCK")


def processor_time_of(pid: int) -> float | None:
    """Processor seconds of all threads of a process, user and kernel mode; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
            return processor_time_in(stat.read())
    except OSError:
        return None


def processor_time_in(line: str) -> float:
    """Processor seconds in a line of /proc/PID/stat, or of a thread's; 0 if the line is too short."""
    # utime and stime; the command name, in parentheses, may hold anything: count from its end.
    fields = line[line.rfind(")") + 2 :].split(None, 13)
    return (int(fields[11]) + int(fields[12])) / _TICKS if len(fields) > 12 else 0.0


MOST_THREADS = 64
"""Threads that are inspected. A trainer has hundreds, most of them idle in the same pool."""

_MOST_BYTES = 16 * 1024  # of one file of /proc
_MOST_FRAMES = 24  # of a kernel stack
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "in uninterruptible sleep",
    "I": "idle",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead, but not reaped (zombie)",
    "X": "dead",
}

# Meanings of wait channels, innermost frames of kernel stacks and system calls, the most specific first. A pattern
# matches only at the start of a word of a function's name: `ll_` is Lustre's, but also part of poll_, epoll_, syscall_.
_MEANINGS = tuple(
    (re.compile(rf"(?<![a-z0-9])(?:{pattern})"), meaning)
    for pattern, meaning in (
        (r"futex", "waits for a lock or another thread"),
        (r"nanosleep", "sleeps for a time it chose"),
        (r"nfs|rpc_wait", "waits for a network file system (NFS)"),
        # fuse_dev is in the stack of a process that serves such a file system.
        (r"fuse(?!_dev)", "waits for a file system in user space (FUSE)"),
        (r"ceph|lustre|ll_|cl_sync|gpfs|mmfs", "waits for a network file system"),
        (r"nvidia|uvm_|amdgpu|kfd_", "waits for the GPU driver"),
        (r"ib_|rdma|mlx|efa_", "waits for the network card's driver (RDMA)"),
        (
            r"percpu_rwsem_wait|sb_start_write",
            "waits for a frozen file system, or another lock of the kernel",
        ),
        (r"io_schedule|folio_wait|wait_on_page|blk_|jbd2|submit_bio|balance_dirty", "waits for a disk"),
        (r"pipe_read|pipe_write|anon_pipe|wait_for_partner", "waits for the other end of a pipe"),
        (
            r"unix_stream|unix_dgram|skb_wait|sk_wait|m?p?tcp_|inet_|sk_stream",
            "waits for the other end of a connection",
        ),
        (r"ep_poll|do_epoll|do_select|do_poll|poll_schedule", "waits for connections or files to be ready"),
        (r"do_wait(?!_)|kernel_wait", "waits for a child process"),
        (r"sigsuspend|sigtimedwait|sys_pause", "waits for a signal"),
        (r"n_tty_read|tty_", "waits for a terminal"),
        (r"locks_lock", "waits for a file that another process has locked"),
        (r"mem_cgroup|reclaim|shrink_|try_charge", "waits for memory"),
        (r"rwsem|mutex|down_", "waits for a lock of the kernel"),
    )
)


@dataclass(frozen=True, slots=True)
class Thread:
    """State of a thread in the kernel; values that could not be read are empty.

    Attributes:
        tid: its number; the main thread's is the process's.
        state: one letter, see proc_pid_stat(5).
        wait_channel: kernel function in which it waits.
        call: its current system call, with the file of the call's descriptor.
        kernel_stack: innermost frame first.
        cpu_seconds: processor time since its start.
    """

    tid: int
    name: str
    state: str
    wait_channel: str = ""
    call: str = ""
    kernel_stack: tuple[str, ...] = ()
    cpu_seconds: float = 0.0

    @property
    def state_in_words(self) -> str:
        """The meaning of the state's letter."""
        return _STATES.get(self.state, f"in state {self.state}")

    @property
    def meaning(self) -> str:
        """The resource that it waits for, as a predicate; empty if that is unknown, or it does not wait."""
        if self.state not in "SDI":
            return ""
        # Only the name of the call: the name of its file must not match a pattern.
        places = (self.wait_channel, *self.kernel_stack[:6], self.call.partition(" ")[0])
        # A network file system may wait in a disk's channel: the stack frames distinguish them.
        for pattern, meaning in _MEANINGS:
            if any(pattern.search(place) for place in places):
                return meaning
        return ""


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """State of a process at one moment.

    Attributes:
        cpu_seconds: processor time since its start, all threads together.
        threads: at most MOST_THREADS, the main thread first.
        thread_count: number of all its threads.
        catches: the signals for which it has handlers.
    """

    pid: int
    cpu_seconds: float
    threads: tuple[Thread, ...]
    thread_count: int
    catches: frozenset[int] = frozenset()

    @property
    def main(self) -> Thread:
        """The main thread."""
        return self.threads[0]

    @property
    def stopped(self) -> bool:
        """True if a signal or a debugger has stopped it."""
        return self.main.state in "Tt"

    @property
    def stuck(self) -> Thread | None:
        """A thread in uninterruptible sleep, which not even SIGKILL ends; the main thread if it is in that state."""
        return next((thread for thread in self.threads if thread.state == "D"), None)


def inspect_process(pid: int) -> ProcessLook | None:
    """Read the state of a process; None if there is no such process. Never raises."""
    line = _read(f"/proc/{pid}/stat")
    main = _thread(pid, pid)
    if not line or main is None:
        return None
    tids: list[int] = []
    with suppress(OSError):
        tids = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    others = (_thread(pid, tid) for tid in [tid for tid in tids if tid != pid][: MOST_THREADS - 1])
    threads = (main, *(thread for thread in others if thread is not None))
    return ProcessLook(pid, processor_time_in(line), threads, max(len(tids), 1), caught_signals(pid))


def caught_signals(pid: int) -> frozenset[int]:
    """The signals for which a process has handlers; all others would have their default effect."""
    found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", _read(f"/proc/{pid}/status"), re.MULTILINE)
    mask = int(found[1], 16) if found else 0
    return frozenset(number for number in range(1, 65) if mask >> (number - 1) & 1)


def render_threads(look: ProcessLook) -> str:
    """A paragraph for each thread: its state, the resource that it waits for, and its kernel stack."""
    blocks = ["\n".join(_lines_of(thread, main=thread is look.main)) for thread in look.threads]
    if look.thread_count > len(look.threads):
        blocks.append(f"... and {look.thread_count - len(look.threads)} more threads")
    return "\n".join(blocks)


def _lines_of(thread: Thread, *, main: bool) -> Iterator[str]:
    place = f" in {thread.wait_channel}" if thread.wait_channel else ""
    meaning = f": {thread.meaning}" if thread.meaning else ""
    call = f"; system call: {thread.call}" if thread.call else ""
    kind = "main thread" if main else "thread"
    yield (
        f"{kind} {thread.tid} ({thread.name}): {thread.state_in_words}{place}{meaning}{call}; "
        f"{thread.cpu_seconds:.2f} s of processor time since it began"
    )
    for frame in thread.kernel_stack:
        yield f"    {frame}"


def _thread(pid: int, tid: int) -> Thread | None:
    folder = f"/proc/{pid}/task/{tid}"
    line = _read(f"{folder}/stat")
    # The name, in parentheses, may contain any character: count from its end.
    begin, mark, fields = line.rpartition(")")
    if not mark:
        return None
    channel = _read(f"{folder}/wchan").strip()
    return Thread(
        tid=tid,
        name=begin.partition("(")[2],
        state=fields.split()[0],
        wait_channel="" if channel == "0" else channel,
        call=_call(pid, _read(f"{folder}/syscall").split()),
        kernel_stack=_kernel_stack(_read(f"{folder}/stack")),
        cpu_seconds=processor_time_in(line),
    )


def _call(pid: int, words: list[str]) -> str:
    if not words or not words[0].isdigit():  # "running", or "-1" outside of a call
        return ""
    number = int(words[0])
    name = _NAMES.get(number, f"number {number}")
    if name not in _TAKE_DESCRIPTOR or len(words) < 2:
        return name
    descriptor = int(words[1], 16) & 0xFFFFFFFF
    with suppress(OSError):
        return f"{name} of {os.readlink(f'/proc/{pid}/fd/{descriptor}')} (descriptor {descriptor})"
    return f"{name} of descriptor {descriptor}"


def _kernel_stack(text: str) -> tuple[str, ...]:
    frames = [line.partition("] ")[2] for line in text.splitlines()]
    return tuple(frame for frame in frames if frame)[:_MOST_FRAMES]


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, _MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    finally:
        os.close(fd)
