"""Detection of workers killed by the kernel OOM killer, and of the cgroup or host that ran out of memory.

A signal has no sender's name. Two other sources have it: the kernel counts, in each memory cgroup, the processes that
the OOM killer killed, before it sends the signal; and it writes the process id into its log.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.spawner.protocol import WorkerExit
from rallypoint.rpc.text import size_in_words, text_in

# ---- The kernel log's records about the OOM killer.


_CHOSEN = re.compile(r"oom-kill:constraint=(?P<constraint>\w+),.*?\bpid=(?P<pid>\d+)")
_CGROUP = re.compile(r"\boom_memcg=(?P<cgroup>[^,]*)")
_KILLED = re.compile(
    r"(?P<what>Memory cgroup out of memory|Out of memory).*?: Kill(?:ed)? process (?P<pid>\d+)"
)
_MOST_RECORDS = 100_000  # a kernel that writes faster than the agent reads must not block it for ever


@dataclass(frozen=True, slots=True)
class OomKill:
    """One process that the kernel OOM killer killed.

    Attributes:
        of_cgroup: True if a cgroup reached its limit; False if the host had no memory left.
        cgroup: name of that cgroup; empty for the host, or if the record does not have it.
    """

    of_cgroup: bool
    cgroup: str


class KernelLog:
    """The kernel's log from now on; empty if this user may not read it. Never blocks."""

    def __init__(self, path: Path = Path("/dev/kmsg")) -> None:
        """Open the log at its end."""
        self._kills: dict[int, OomKill] = {}
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            self._fd = -1
            return
        # Older records are useless: their process ids may belong to other processes now.
        with contextlib.suppress(OSError):
            os.lseek(self._fd, 0, os.SEEK_END)

    def kill_of(self, pid: int) -> OomKill | None:
        """The record about a process, by its number in the host's own pid namespace; None if there is none."""
        self._read()
        return self._kills.get(pid)

    def close(self) -> None:
        """Close the log; the records that were read are kept."""
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
                continue  # some records were overwritten before they were read; the next ones can be read
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


# ---- The memory cgroups of this process, version 2 or 1, with their limits and their counts of kills.


_UNLIMITED = 1 << 60  # in version 1, "no limit" is the largest number of pages


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """State of a memory cgroup at one moment.

    Attributes:
        name: its path below the mount point, as in "/job/step0".
        limit: bytes that its processes may use together; None: no limit.
        kills: its processes that the OOM killer has killed so far; in version 2, also those of its descendants.
        hits: how often it has reached its limit so far; in version 2, how often a process had to be killed for that.
    """

    name: str
    limit: int | None
    kills: int
    hits: int


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """The memory cgroup of this process and its ancestors, its own first; empty if none is visible.

    Args:
        root: folder with /proc and /sys.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths: dict[bool, str] = {}  # True: version 1
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[True] = path
        elif number == "0":
            paths[False] = path
    # If both versions are mounted, the controller is in one of them, and /proc names it there.
    old = True in paths
    top, mounted_path = _mount(mounts, old)
    if top is None or old not in paths:
        return []
    below = paths[old].removeprefix(mounted_path.rstrip("/")) if mounted_path != "/" else paths[old]
    return _from(root / top.relative_to("/"), below, old)


def _mount(mounts: list[str], old: bool) -> tuple[Path | None, str]:
    """The mount point of the hierarchy, and the cgroup that is mounted there."""
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.partition(" ")
        controllers = options.rpartition(" ")[2].split(",")
        if (old and kind == "cgroup" and "memory" in controllers) or (not old and kind == "cgroup2"):
            fields = before.split()
            return Path(fields[4]), fields[3]
    return None, "/"


def _from(top: Path, below: str, old: bool) -> list[MemoryGroup]:
    folder = top / below.lstrip("/")
    if ".." in folder.parts or not folder.is_dir():
        folder = top  # the path belongs to another cgroup namespace: only the mounted part is visible
    groups = []
    while True:
        name = "/" + str(folder.relative_to(top)).removeprefix(".")
        group = _read_old(folder, name) if old else _read(folder, name)
        if group is not None:
            groups.append(group)
        if folder == top:
            return groups
        folder = folder.parent


def _read(folder: Path, name: str) -> MemoryGroup | None:
    events = _counts(folder / "memory.events")
    if "oom_kill" not in events:
        return None
    return MemoryGroup(name, _number(folder / "memory.max"), events["oom_kill"], events.get("oom", 0))


def _read_old(folder: Path, name: str) -> MemoryGroup | None:
    control = _counts(folder / "memory.oom_control")
    if "oom_kill" not in control:
        return None
    limit = _number(folder / "memory.limit_in_bytes")
    limit = limit if limit is not None and limit < _UNLIMITED else None
    return MemoryGroup(name, limit, control["oom_kill"], _number(folder / "memory.failcnt") or 0)


def _counts(path: Path) -> dict[str, int]:
    pairs = [line.split() for line in text_in(path).splitlines()]
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    text = text_in(path)
    return int(text) if text.isdecimal() else None


class MemoryWatch:
    """Compares the counts of OOM kills before the workers were started with those after an exit."""

    def __init__(
        self, groups: Callable[[], list[MemoryGroup]] = memory_groups, log: KernelLog | None = None
    ) -> None:
        """Read the counts.

        Args:
            groups: returns the present state of this process's cgroups, which are also those of its workers.
            log: the kernel's log; None for this host's.
        """
        self._groups = groups
        self._before = {group.name: group for group in groups()}
        self._log = log if log is not None else KernelLog(Path("/dev/kmsg"))

    def explain(self, exit_: WorkerExit) -> str | None:
        """A sentence that the kernel OOM killer killed a worker, and why; None if nothing shows that it did."""
        if exit_.signal != signal.SIGKILL:
            return None
        now = self._groups()
        kill = self._log.kill_of(exit_.pid)
        if kill is None and self._kills(now) == 0:
            return None
        peak = f"; its peak was {size_in_words(exit_.max_rss)}" if exit_.max_rss else ""
        return f"killed by the kernel OOM killer (SIGKILL): {self._cause(now, kill)}{peak}"

    def hint(self, exit_: WorkerExit) -> str:
        """Return an addition to the sentence about a worker whose exit `explain` does not explain; may be empty.

        One of its child processes may have been killed, and that may be the reason for its exit. If it was killed
        itself, it is useful to know that the kernel OOM killer did not do it.
        """
        now = self._groups()
        if kills := self._kills(now):
            count = "1 process" if kills == 1 else f"{kills} processes"
            return f"; the kernel OOM killer has killed {count} in this agent's cgroup since the workers were started"
        if exit_.signal != signal.SIGKILL or exit_.inferred:
            return ""
        if now and now[0].name in self._before:
            return "; another process sent it, not the kernel OOM killer"
        return "; sent by another process, or by the kernel OOM killer: see dmesg"

    def close(self) -> None:
        """Close the kernel's log."""
        self._log.close()

    def _kills(self, now: list[MemoryGroup]) -> int:
        """Number of processes that were killed in this process's own cgroup."""
        if not now or now[0].name not in self._before:
            return 0
        return max(0, now[0].kills - self._before[now[0].name].kills)

    def _cause(self, now: list[MemoryGroup], kill: OomKill | None) -> str:
        """The limit that was reached: a cgroup's, or the memory of the host."""
        if kill is not None and not kill.of_cgroup:
            return "the host had no memory left"
        named = [group for group in now if kill is not None and kill.cgroup.endswith(group.name)]
        # Each cgroup also counts the events of its descendants, so the lowest one is the cause.
        grown = [
            group
            for group in now
            if group.limit is not None
            and group.name in self._before
            and group.hits > self._before[group.name].hits
        ]
        for group in (*(group for group in named if group.limit is not None), *grown):
            return f"its cgroup {group.name} reached its memory limit of {size_in_words(group.limit or 0)}"
        if kill is not None:
            return f"its cgroup {kill.cgroup}".rstrip() + " reached its memory limit"
        return "the host had no memory left"
