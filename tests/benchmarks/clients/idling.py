"""Client process of `idle`: starts an agent whose workers do nothing, and measures its cost."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.clients import announcing
from benchmarks.clients.command import obey
from benchmarks.clients.launching import with_compiled
from support.mortal import mortal

_START = 60.0  # seconds until all workers run
_SETTLE = 3.0  # seconds after that until the agent has completed its start
_END = 15.0  # seconds that it may take to end
_TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class IdleOrder:
    """A request to the client process.

    Attributes:
        agent: command of an agent, without the worker's.
        workers: number of its workers.
        seconds: duration of the measurement.
        compiled: folder for compiled Python files, as an installed program has them.
    """

    agent: list[str]
    workers: int
    seconds: float
    compiled: str


@dataclass(frozen=True, slots=True)
class IdleResult:
    """The resources of the agent and its helper processes, without the workers.

    Attributes:
        cpu: share of one processor, in percent.
        memory: bytes; a page that several of them share counts once (PSS).
        resident: bytes of the agent's own process that are in memory, shared or not (RSS).
    """

    cpu: float
    memory: float
    resident: float


def main(order: IdleOrder) -> IdleResult:
    """Carry out the order."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as here:
        here.bind(f"{folder}/announcements")
        here.settimeout(_START)
        agent = subprocess.Popen(
            mortal(*order.agent, announcing.__file__, f"{folder}/announcements"),
            env=with_compiled(order.compiled),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        try:
            for _ in range(order.workers):
                here.recv(4096)
            return _watched(agent.pid, order.seconds)
        except TimeoutError:
            sys.exit(f"not all workers ran within {_START:g} s")
        finally:
            agent.terminate()
            with suppress(subprocess.TimeoutExpired):
                agent.wait(_END)
            agent.kill()
            agent.wait()


def _watched(agent: int, seconds: float) -> IdleResult:
    time.sleep(_SETTLE)
    ours = _supervisors(agent)
    before, began = sum(map(_ticks, ours)), time.monotonic()
    time.sleep(seconds)
    spent = (sum(map(_ticks, ours)) - before) / _TICK
    cpu = 100.0 * spent / (time.monotonic() - began)
    return IdleResult(cpu, sum(_memory(pid, "Pss:") for pid in ours), _memory(agent, "Rss:"))


def _supervisors(agent: int) -> list[int]:
    """Return the process ids of the agent and its descendants, without the workers."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError, IndexError):
                stat = Path("/proc", name, "stat").read_text()
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found, waiting = [], [agent]
    while waiting:
        pid = waiting.pop()
        if announcing.__file__.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != agent:
            continue
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _memory(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


if __name__ == "__main__":
    obey(IdleOrder, main)
