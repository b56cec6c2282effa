"""Checks that a host has room: on its disks and in its memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rallypoint.agent.amounts import Amount, in_words
from rallypoint.agent.health import Surroundings

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def look_at_disks(where: Surroundings, least: Amount) -> str | None:
    """Why there is not room enough where the job writes; None if there is.

    Raises:
        OSError: One of the folders can't be looked at.
    """
    seen: set[int] = set()
    for folder in where.folders:
        device = os.stat(folder).st_dev
        if device in seen:
            continue
        seen.add(device)
        disk = os.statvfs(folder)
        whole, free = disk.f_frsize * disk.f_blocks, disk.f_frsize * disk.f_bavail
        if free < least.of(whole):
            return f"{in_words(free)} of {in_words(whole)} are free at {folder}; {_wanted(least, whole)}"
        if disk.f_files and not disk.f_favail:
            return f"no file can be made at {folder}: its file system has no inode left"
    return None


def look_at_memory(
    _: Surroundings, least: Amount, proc: Path = _PROC, cgroups: Path = _CGROUPS
) -> str | None:
    """Why there is not memory enough, of the host or of a cgroup that this process is in; None if there is.

    Args:
        least: How much there must be.
        proc: Where the kernel tells of the host.
        cgroups: Where cgroups are mounted.

    Raises:
        OSError: The kernel does not tell.
    """
    host = _figures(proc / "meminfo")
    whole, free = host["MemTotal:"] * 1024, host["MemAvailable:"] * 1024
    if free < least.of(whole):
        return f"{in_words(free)} of {in_words(whole)} of memory are available; {_wanted(least, whole)}"
    for whole, free in _rooms(proc, cgroups):
        if free < least.of(whole):
            left = f"{in_words(max(0, free))} of the {in_words(whole)} of memory that its cgroup may have are left"
            return f"{left}; {_wanted(least, whole)}"
    return None


def _wanted(least: Amount, whole: int) -> str:
    part = "" if least.part is None else f" ({100 * least.part:g} %)"
    return f"{in_words(least.of(whole))}{part} must be"


def _rooms(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Limit and what is left of it, of each cgroup around this process that has a limit."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = cgroups, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = cgroups / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            # Not there: a container sees its own cgroup as the root, under a path that is the host's.
            with suppress(OSError, ValueError, KeyError):
                limit = int((group / names[0]).read_text())  # "max": no limit
                used = int((group / names[1]).read_text())
                # Files that nobody has used lately give way as soon as memory is wanted.
                yield limit, limit - used + _figures(group / "memory.stat")[names[2]]
            group = group.parent


def _figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
