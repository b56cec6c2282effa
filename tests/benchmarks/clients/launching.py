"""Client process of `launch`: runs a command repeatedly, and measures it from start to end."""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import time
from dataclasses import dataclass

from benchmarks.clients.command import obey
from support.mortal import mortal


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """A request to the client process.

    Attributes:
        command: the measured command.
        times: number of measured executions; one more comes first, to fill caches.
        compiled: folder for compiled Python files, as an installed program has them.
    """

    command: list[str]
    times: int
    compiled: str


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """Medians of the seconds from start to end, and of the CPU seconds of the command and all its children."""

    seconds: float
    cpu: float


def with_compiled(folder: str) -> dict[str, str]:
    """Return an environment in which Python keeps compiled files in a folder."""
    rest = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return rest | {"PYTHONPYCACHEPREFIX": folder}


def main(order: LaunchOrder) -> LaunchResult:
    """Carry out the order; a failing command raises CalledProcessError."""
    environment = with_compiled(order.compiled)
    seconds: list[float] = []
    cpu: list[float] = []
    for _ in range(order.times + 1):
        before, began = _spent(), time.monotonic()
        subprocess.run(
            mortal(*order.command),
            check=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        seconds.append(time.monotonic() - began)
        cpu.append(_spent() - before)
    return LaunchResult(statistics.median(seconds[1:]), statistics.median(cpu[1:]))


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    obey(LaunchOrder, main)
