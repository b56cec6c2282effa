"""Checks of a host's health, by their names in `--health-check`.

disk:2% or disk:10GiB       so much must be free on the disks of logs and temporary files
memory:5% or memory:1GiB    so much must be available, to the host and to the agent's cgroups
gpu                         no GPU is lost, or has memory errors that the driver can't repair (needs nvidia-ml-py)
command:PROGRAM ARGS        the program ends with exit code 0; if not, its last line of output is the reason
NAME or NAME:ARGUMENT       a check of the entry-point group `rallypoint.health_checks`
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.config.rlimits import Quantity, QuantityError, parse_quantity
from rallypoint.agent.health.helper_processes import missing
from rallypoint.rpc.endpoint import SettingError
from rallypoint.rpc.text import size_in_words

ENTRY_POINTS = "rallypoint.health_checks"
"""Entry-point group of plug-ins: each is a function of the text after the name's colon ("" without one), which returns
one sentence if the host is not healthy, else None. It runs in a thread of its own, and may raise or take long."""

_BUILT_IN = ("disk", "memory", "gpu", "command")


class HealthCheckError(SettingError):
    """A check that does not exist, or an invalid argument; one line."""


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Input of a check from the job.

    Attributes:
        folders: The job's folders for logs and temporary files.
        visible_gpus: CUDA_VISIBLE_DEVICES of its workers; None: all.
    """

    folders: tuple[Path, ...] = ()
    visible_gpus: str | None = None


Look = Callable[[CheckContext], str | None]
"""Checks the host; returns the reason if it is not healthy, else None. May block, and may raise."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One check.

    Attributes:
        name: Its text in the configuration.
        check: Function to call in a thread; None for a program.
        program: Program and arguments; None for a function.
    """

    name: str
    check: Look | None = None
    program: tuple[str, ...] | None = None


def parse_health_check(text: str, path: str | None = None) -> HealthCheck:
    """Parse a health check.

    Args:
        text: See the module.
        path: PATH on which a program is looked up; None: the system's.

    Raises:
        HealthCheckError: There is no such check, or this host can't run it.
    """
    name, colon, argument = text.partition(":")
    match name:
        case "disk" | "memory":
            example = "disk:2% or disk:10GiB" if name == "disk" else "memory:5% or memory:1GiB"
            least = _format_quantity(text, argument, example)
            look = check_disks if name == "disk" else check_memory
            return HealthCheck(text, check=lambda where: look(where, least))
        case "gpu" if not colon:
            from rallypoint.agent.health.gpu import GpuLibraryError, check_gpus, gpu_library  # noqa: PLC0415

            try:
                nvml = gpu_library()
            except GpuLibraryError as error:
                raise HealthCheckError(f"health check 'gpu': {error}") from None
            return HealthCheck(text, check=lambda where: check_gpus(nvml, where.visible_gpus))
        case "command":
            return HealthCheck(text, program=_command(text, argument, path))
    return HealthCheck(text, check=_plug_in(text, name, argument))


def _format_quantity(text: str, argument: str, example: str) -> Quantity:
    try:
        return parse_quantity(argument)
    except QuantityError as error:
        raise HealthCheckError(f"health check {text!r}: {error}; expected as in {example}") from None


def _command(text: str, argument: str, path: str | None) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(argument))
    except ValueError as error:
        raise HealthCheckError(f"health check {text!r}: {str(error).lower()}; check its quotes") from None
    if not words:
        raise HealthCheckError(
            f"health check {text!r} names no program; expected as in command:/opt/check --all"
        )
    if (why := missing(words[0], path)) is not None:
        raise HealthCheckError(f"health check {text!r}: {why}")
    return words


def _plug_in(text: str, name: str, argument: str) -> Look:
    from importlib.metadata import entry_points  # noqa: PLC0415  # slow, and rarely needed

    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join((*_BUILT_IN, *sorted(found)))
        raise HealthCheckError(f"there is no health check {text!r}; expected one of {known}, as in disk:2%")
    try:
        check = found[name].load()
    except Exception as error:
        raise HealthCheckError(f"health check {text!r} can't be loaded: {error!r}") from None

    def look(_: CheckContext) -> str | None:
        why = check(argument)
        return None if why is None else str(why)

    return look


# ---- Checks of free disk space and memory.


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def check_disks(where: CheckContext, least: Quantity) -> str | None:
    """Return the reason if a disk of the job has too little free space, else None.

    Raises:
        OSError: One of the folders can't be read.
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
            return f"{size_in_words(free)} of {size_in_words(whole)} are free at {folder}; {_required(least, whole)}"
        if disk.f_files and not disk.f_favail:
            return f"no file can be made at {folder}: its file system has no inode left"
    return None


def check_memory(
    _: CheckContext, least: Quantity, proc: Path = _PROC, cgroups: Path = _CGROUPS
) -> str | None:
    """Return the reason if the host or a cgroup of this process has too little available memory, else None.

    Raises:
        OSError: The kernel's files can't be read.
    """
    host = _figures(proc / "meminfo")
    whole, free = host["MemTotal:"] * 1024, host["MemAvailable:"] * 1024
    if free < least.of(whole):
        return f"{size_in_words(free)} of {size_in_words(whole)} of memory are available; {_required(least, whole)}"
    for whole, free in _rooms(proc, cgroups):
        if free < least.of(whole):
            left = f"{size_in_words(max(0, free))} of its cgroup's memory limit of {size_in_words(whole)} are left"
            return f"{left}; {_required(least, whole)}"
    return None


def _required(least: Quantity, whole: int) -> str:
    part = "" if least.part is None else f" ({100 * least.part:g} %)"
    return f"{size_in_words(least.of(whole))}{part} required"


def _rooms(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit and the available bytes of each cgroup of this process that has a limit."""
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
            # A missing file is normal: a container sees its own cgroup as the root, but the path is the host's.
            with suppress(OSError, ValueError, KeyError):
                limit = int((group / names[0]).read_text())  # "max": no limit
                used = int((group / names[1]).read_text())
                # The kernel drops pages of inactive files as soon as memory is needed.
                yield limit, limit - used + _figures(group / "memory.stat")[names[2]]
            group = group.parent


def _figures(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
