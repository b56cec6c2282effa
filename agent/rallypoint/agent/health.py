"""Checks of a host's health, by name: what `--health-check` takes.

disk:2% or disk:10GiB       so much must be free where logs and temporary files are
memory:5% or memory:1GiB    so much must be available, to the host and to the cgroup that the agent is in
gpu                         no GPU is lost, or has memory errors that the driver can't repair (needs nvidia-ml-py)
command:PROGRAM ARGS        the program ends with exit code 0; the last line that it says is the reason if not
NAME or NAME:ARGUMENT       a check of the entry-point group `rallypoint.health_checks`
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rallypoint.agent.amounts import Amount, AmountError, parse_amount
from rallypoint.agent.side_programs import missing
from rallypoint.rpc.endpoint import SettingError

ENTRY_POINTS = "rallypoint.health_checks"
"""Group of the plug-ins: each is a function of the text after the name's colon ("" without one), which returns why
the host is not healthy, in one sentence, or None. It runs in a thread of its own, and may raise or take long."""

_BUILT_IN = ("disk", "memory", "gpu", "command")


class HealthCheckError(SettingError):
    """A check that does not exist, or an argument that it can't have; one line."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a look at the host needs to know of the job.

    Attributes:
        folders: Where it writes: logs and temporary files.
        visible_gpus: CUDA_VISIBLE_DEVICES of its workers; None: all.
    """

    folders: tuple[Path, ...] = ()
    visible_gpus: str | None = None


Look = Callable[[Surroundings], str | None]
"""Looks at the host; returns why it is not healthy, or None. May block, and may raise."""


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """One check.

    Attributes:
        name: As it was asked for.
        look: What to call, in a thread; None for a program.
        program: Program and arguments; None for a look.
    """

    name: str
    look: Look | None = None
    program: tuple[str, ...] | None = None


def parse_health_check(text: str, path: str | None = None) -> HealthCheck:
    """The check that a text asks for.

    Args:
        text: See the module.
        path: PATH on which a program is looked up; None: the system's.

    Raises:
        HealthCheckError: There is no such check, or it can't be had on this host.
    """
    name, colon, argument = text.partition(":")
    match name:
        case "disk" | "memory":
            from rallypoint.agent.health_room import look_at_disks, look_at_memory  # noqa: PLC0415

            example = "disk:2% or disk:10GiB" if name == "disk" else "memory:5% or memory:1GiB"
            least = _amount(text, argument, example)
            look = look_at_disks if name == "disk" else look_at_memory
            return HealthCheck(text, look=lambda where: look(where, least))
        case "gpu" if not colon:
            from rallypoint.agent.health_gpu import look_at_gpus  # noqa: PLC0415
            from rallypoint.agent.nvml import GpuLibraryError, gpu_library  # noqa: PLC0415

            try:
                nvml = gpu_library()
            except GpuLibraryError as error:
                raise HealthCheckError(f"health check 'gpu': {error}") from None
            return HealthCheck(text, look=lambda where: look_at_gpus(nvml, where.visible_gpus))
        case "command":
            return HealthCheck(text, program=_command(text, argument, path))
    return HealthCheck(text, look=_plug_in(text, name, argument))


def _amount(text: str, argument: str, example: str) -> Amount:
    try:
        return parse_amount(argument)
    except AmountError as error:
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
    from importlib.metadata import entry_points  # noqa: PLC0415  # slow, and wanted by few

    found = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in found:
        known = ", ".join((*_BUILT_IN, *sorted(found)))
        raise HealthCheckError(f"there is no health check {text!r}; expected one of {known}, as in disk:2%")
    try:
        check = found[name].load()
    except Exception as error:
        raise HealthCheckError(f"health check {text!r} can't be loaded: {error!r}") from None

    def look(_: Surroundings) -> str | None:
        why = check(argument)
        return None if why is None else str(why)

    return look
