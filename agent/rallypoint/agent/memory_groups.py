"""The memory cgroups that this process is in, version 2 or 1, and what they count of their limits and kills."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
