"""Whether it was the kernel that killed a worker, for want of memory, and whose memory was used up.

A signal does not say who sent it. Two others do: the kernel counts, in each memory cgroup, the processes that it has
killed so, and it does that before it sends the signal; and it writes the process id into its log.
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

# ---- What the kernel has to say of processes that it killed for want of memory.


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


# ---- The memory cgroups that this process is in, version 2 or 1, and what they count of their limits and kills.


_UNLIMITED = 1 << 60  # version 1 says "no limit" by the largest number of pages


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory cgroup at a moment.

    Attributes:
        name: its path below the mount point, as in "/job/step0".
        limit: bytes that its processes may use together; None: as many as there are.
        kills: processes of it that the kernel killed for want of memory, so far; in version 2, of those below too.
        hits: times that it was at its limit, so far; in version 2, that a process had to be killed for that.
    """

    name: str
    limit: int | None
    kills: int
    hits: int


def memory_groups(root: Path = Path("/")) -> list[MemoryGroup]:
    """The memory cgroup of this process and those above it, its own first; empty where there is none to be seen.

    Args:
        root: where /proc and /sys are.
    """
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths: dict[bool, str] = {}  # by whether it is of version 1
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[True] = path
        elif number == "0":
            paths[False] = path
    # Where both versions are mounted, the controller is in one of them, and then /proc names it there.
    old = True in paths
    top, mounted_path = _mount(mounts, old)
    if top is None or old not in paths:
        return []
    below = paths[old].removeprefix(mounted_path.rstrip("/")) if mounted_path != "/" else paths[old]
    return _from(root / top.relative_to("/"), below, old)


def _mount(mounts: list[str], old: bool) -> tuple[Path | None, str]:
    """Where the hierarchy is mounted, and which of its cgroups is at that place."""
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
        folder = top  # a namespace of another's: what is mounted is all that can be seen
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
    try:
        pairs = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


class MemoryWatch:
    """Remembers how often the kernel had killed for want of memory before workers were started."""

    def __init__(
        self,
        groups: Callable[[], list[MemoryGroup]] = memory_groups,
        log: KernelLog | None = None,
    ) -> None:
        """Begin now.

        Args:
            groups: what the cgroups of this process, which are those of its workers, say now.
            log: the kernel's log; None for this host's.
        """
        self._groups = groups
        self._before = {group.name: group for group in groups()}
        self._log = log if log is not None else KernelLog(Path("/dev/kmsg"))

    def explain(self, how: WorkerExit) -> str | None:
        """That the kernel killed a worker for want of memory, in a sentence; None if nothing shows that it did."""
        if how.signal != signal.SIGKILL:
            return None
        now = self._groups()
        word = self._log.kill_of(how.pid)
        if word is None and self._kills(now) == 0:
            return None
        peak = f"; its peak was {in_units(how.max_rss)}" if how.max_rss else ""
        return f"killed by the kernel for want of memory (SIGKILL): {self._whose(now, word)}{peak}"

    def hint(self, how: WorkerExit) -> str:
        """What to add to the sentence about a worker whose end `explain` does not explain; may be empty.

        A process of its own may have been killed, and that may be why it ended; and where it was killed itself, it is
        worth knowing that it was not by the kernel.
        """
        now = self._groups()
        if kills := self._kills(now):
            what = "a process" if kills == 1 else f"{kills} processes"
            return f"; the kernel has killed {what} here for want of memory since the workers were started"
        if how.signal != signal.SIGKILL or how.inferred:
            return ""
        if now and now[0].name in self._before:
            return "; not by the kernel for want of memory: somebody sent it"
        return "; if nobody sent it, the kernel's OOM killer may have: see dmesg"

    def close(self) -> None:
        """Watch no more."""
        self._log.close()

    def _kills(self, now: list[MemoryGroup]) -> int:
        """How many processes of this one's own cgroup were killed."""
        if not now or now[0].name not in self._before:
            return 0
        return max(0, now[0].kills - self._before[now[0].name].kills)

    def _whose(self, now: list[MemoryGroup], word: OomKill | None) -> str:
        """Whose memory was used up."""
        if word is not None and not word.of_cgroup:
            return "the host had none left"
        named = [group for group in now if word is not None and word.cgroup.endswith(group.name)]
        # Each counts what happens to those below it as well, so the lowest is the one.
        grown = [
            group
            for group in now
            if group.limit is not None
            and group.name in self._before
            and group.hits > self._before[group.name].hits
        ]
        for group in (*(group for group in named if group.limit is not None), *grown):
            return f"its cgroup {group.name} had used up its limit of {in_units(group.limit or 0)}"
        if word is not None:
            return f"the limit of its cgroup {word.cgroup}".rstrip() + " was used up"
        return "the host had none left"


def in_units(count: int) -> str:
    """Bytes for people, as in "1.5 GiB"."""
    number, unit = float(count), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024:
            break
        number, unit = number / 1024, larger
    return f"{number:.0f} {unit}" if unit == "bytes" else f"{number:.1f} {unit}"
