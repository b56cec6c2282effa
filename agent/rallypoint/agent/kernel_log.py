"""What the kernel has to say of processes that it killed for want of memory."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

_CHOSEN = re.compile(r"oom-kill:constraint=(?P<constraint>\w+),.*?\bpid=(?P<pid>\d+)")
_CGROUP = re.compile(r"\boom_memcg=(?P<cgroup>[^,]*)")
_KILLED = re.compile(
    r"(?P<what>Memory cgroup out of memory|Out of memory).*?: Kill(?:ed)? process (?P<pid>\d+)"
)
_MOST_RECORDS = 100_000  # a kernel that writes faster than this is read must not hold us up for ever


@dataclass(frozen=True, slots=True)
class OomKill:
    """One process that the kernel killed for want of memory.

    Attributes:
        of_cgroup: whether a cgroup's limit was reached, and not the host's memory.
        cgroup: name of that cgroup; empty if it was the host, or is not told.
    """

    of_cgroup: bool
    cgroup: str


class KernelLog:
    """The kernel's log from a moment on, where this user may read it. Never waits."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        """Begin now."""
        self._kills: dict[int, OomKill] = {}
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        # What was written before says nothing: the process ids of then may be others' now.
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_END)

    def kill_of(self, pid: int) -> OomKill | None:
        """The kernel's word about a process, by its number in the host's own pid namespace; None: it has none."""
        self._read()
        return self._kills.get(pid)

    def close(self) -> None:
        """Read no more; what was read stays known."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read(self) -> None:
        for _ in range(_MOST_RECORDS):
            if self._fd < 0:
                return
            try:
                record = os.read(self._fd, 8192)
            except BrokenPipeError:
                continue  # some were overwritten before we came to them; what follows is there
            except OSError as error:
                if not isinstance(error, BlockingIOError):
                    self.close()
                return
            if not record:
                return
            self._take(record.decode("utf-8", "replace"))

    def _take(self, record: str) -> None:
        if (chosen := _CHOSEN.search(record)) is not None:
            of_cgroup = chosen["constraint"] == "CONSTRAINT_MEMCG"
            cgroup = _CGROUP.search(record) if of_cgroup else None
            kill = OomKill(of_cgroup, cgroup["cgroup"] if cgroup is not None else "")
            self._kills[int(chosen["pid"])] = kill
        elif (killed := _KILLED.search(record)) is not None:
            with contextlib.suppress(ValueError):
                kill = OomKill(killed["what"].startswith("Memory cgroup"), "")
                self._kills.setdefault(int(killed["pid"]), kill)
