"""Client process of `restart` and `newcomer`: starts the agents of a job, disturbs it, and waits for the next world."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clients import announcing
from benchmarks.clients.command import obey
from benchmarks.clients.launching import with_compiled
from support.mortal import mortal

_END = 15.0  # seconds that an agent may take to end


@dataclass(frozen=True, slots=True)
class RegroupOrder:
    """A request to the client process.

    Attributes:
        kind: "restart": kill a worker with SIGKILL; "newcomer": start one more agent.
        agent: command of an agent, without the worker's.
        agents: number of agents that are started before.
        workers: number of workers of each agent.
        compiled: folder for compiled Python files, as an installed program has them.
        log: file for the output of the agents.
        timeout: seconds until a world is complete.
    """

    kind: str
    agent: list[str]
    agents: int
    workers: int
    compiled: str
    log: str
    timeout: float


@dataclass(frozen=True, slots=True)
class RegroupResult:
    """Seconds from the disturbance until all workers of the next world have reported their start."""

    seconds: float


@dataclass(slots=True)
class _World:
    """The workers that have reported their start since some moment, by rank."""

    since: float
    size: int
    pids: dict[int, int] = field(default_factory=dict)
    complete_at: float = 0.0

    def take(self, message: bytes) -> bool:
        """Record an announcement; return True if the world is complete."""
        worker = json.loads(message)
        if worker["at"] >= self.since and worker["world"] == self.size:
            self.pids[worker["rank"]] = worker["pid"]
            self.complete_at = max(self.complete_at, worker["at"])
        return len(self.pids) == self.size


def main(order: RegroupOrder) -> RegroupResult:
    """Carry out the order.

    Raises:
        SystemExit: A world was not complete in time; the message names it.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        place = f"{folder}/announcements"
        announcements = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        announcements.bind(place)
        announcements.settimeout(1.0)
        for _ in range(order.agents):
            stack.enter_context(_agent(order, place))
        size = order.agents * order.workers
        world = _gathered(announcements, _World(0.0, size), order, "the first world")
        began = time.monotonic()
        if order.kind == "newcomer":
            stack.enter_context(_agent(order, place))
            size += order.workers
        else:
            os.kill(world.pids[size - 1], signal.SIGKILL)
        world = _gathered(announcements, _World(began, size), order, "the world after the harm")
    return RegroupResult(world.complete_at - began)


def _gathered(announcements: socket.socket, world: _World, order: RegroupOrder, what: str) -> _World:
    deadline = time.monotonic() + order.timeout
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            if world.take(announcements.recv(4096)):
                return world
    sys.exit(f"{what}: {len(world.pids)} of {world.size} workers within {order.timeout:g} s")


@contextmanager
def _agent(order: RegroupOrder, place: str) -> Iterator[None]:
    with Path(order.log).open("a") as log:
        agent = subprocess.Popen(
            mortal(*order.agent, announcing.__file__, place),
            env=with_compiled(order.compiled),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        agent.terminate()
        with suppress(subprocess.TimeoutExpired):
            agent.wait(_END)
        agent.kill()
        agent.wait()


if __name__ == "__main__":
    obey(RegroupOrder, main)
