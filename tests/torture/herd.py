"""Many agents of one job, each with its spawner, guard and worker, any of which may be killed at any time."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import signal
import time
from pathlib import Path
from typing import TextIO

import psutil

from local_cluster import Job, LocalCluster, RunWatch
from programs import Program
from rallypoint.agent.spawner.spawner import descendants
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from support.waiting import until

WORKER = Path(__file__).with_name("patient_worker.py")
RUN = "herd"
PARTS = ("agent", "guard", "spawner", "worker")
# Starts at the same time: each spends half a second of processor time on imports.
_AT_ONCE = 8
# The kernel's names of a spawner's processes.
_NAMES = {"rallypoint-grd": "guard", "rallypoint-spwn": "spawner"}


class Herd:
    """Agents that a scheduler keeps alive: a killed one is started again, as another node.

    Attributes:
        agents: those that are meant to live.
        kills: how often each part was killed.
    """

    def __init__(self, cluster: LocalCluster, folder: Path, size: int, patience: float) -> None:
        """Start nothing yet. `patience`: seconds to wait for steps that should take a few."""
        self.agents: list[Program] = []
        self.kills = dict.fromkeys(PARTS, 0)
        self._cluster = cluster
        self._size = size
        self._patience = patience
        self._started = 0
        self._bag: list[str] = []
        self._gate = asyncio.Semaphore(_AT_ONCE)
        self._lock = _locked(folder / "lock")
        self._job = Job(
            RUN,
            (str(WORKER), str(folder)),
            nodes=f"{max(1, size // 2)}:{size}",
            workers=1,
            max_restarts=10_000,
            conf={"last_call_timeout": "30", "restart_backoff": "0", "exit_barrier_timeout": f"{patience}"},
            log_dir=folder / "logs",
        )
        self._watch: RunWatch

    async def start(self) -> pb.Run:
        """Start them all; return when all are in one round."""
        await self._grow()
        self._watch = self._cluster.watch(RUN)
        return await self._whole(after=0)

    async def strike(self, draw: random.Random, count: int) -> pb.Run:
        """Kill `count` processes at once, and start agents for those that died; return when all are in a round.

        All descendants of a killed process are dead then.
        """
        before = (await self._cluster.get_run(RUN)).round
        victims, families = draw.sample(self.agents, count), await _families(self.agents)
        dying: list[psutil.Process] = []
        for agent in victims:
            part = self._next_part(draw)
            self.kills[part] += 1
            if part == "agent":
                agent.told_to_end = True
                self.agents.remove(agent)
            dying += [families[agent.pid][below] for below in PARTS[PARTS.index(part) :]]
            os.kill(families[agent.pid][part].pid, signal.SIGKILL)
        await self._grow()
        run = await self._whole(after=before)
        await until(lambda: not any(map(_lives, dying)), f"the end of what was killed, of {dying}")
        return run

    def _next_part(self, draw: random.Random) -> str:
        """Choose the part to kill: in random order, and none much more often than another."""
        if not self._bag:
            self._bag = draw.sample(PARTS, len(PARTS))
        return self._bag.pop()

    async def finish(self) -> None:
        """Let the workers succeed; return when every agent has ended with 0."""
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        codes = await asyncio.gather(*(agent.ended(self._patience) for agent in self.agents))
        self._lock.close()
        assert set(codes) == {0}, [agent.report for agent in self.agents if agent.report]

    async def descriptors(self) -> dict[str, dict[int, int]]:
        """Return the number of descriptors of each agent, guard and spawner, by its process id."""
        families = await _families(self.agents)
        return {
            part: {family[part].pid: family[part].num_fds() for family in families.values()}
            for part in PARTS
            if part != "worker"
        }

    async def burial(self) -> None:
        """Wait until no process below the agents is a zombie."""
        deadline = time.monotonic() + self._patience
        while zombies := await asyncio.to_thread(self._zombies):
            assert time.monotonic() < deadline, f"nobody buries {zombies}"
            await asyncio.sleep(0.1)

    def _zombies(self) -> list[str]:
        """Return the zombies below the agents, each with its parent."""
        agents = {agent.pid for agent in self.agents}
        ours = set(agents)
        found: list[str] = []
        for each in descendants(os.getpid()):  # parents come before children
            if each.parent in ours:
                ours.add(each.pid)
                found += [f"{_name(each.pid)} below {_name(each.parent)}"] if each.dead else []
        return found

    async def _grow(self) -> None:
        async def start(number: int) -> Program:
            async with self._gate:
                return await self._cluster.start_agent(f"agent-{number}", self._job)

        async def start_all(numbers: range) -> list[Program]:
            return list(await asyncio.gather(*map(start, numbers)))

        numbers = range(self._started, self._started + self._size - len(self.agents))
        self._started = numbers.stop
        self.agents += await self._cluster.unless_one_fails(start_all(numbers))

    async def _whole(self, after: int) -> pb.Run:
        """Wait until all of them run workers in one round later than `after`."""

        def whole(run: pb.Run) -> bool:
            return run.round > after and run.phase == pb.PHASE_FINAL and run.world_size == self._size

        watching = self._watch.until("a round of all agents", whole, self._patience)
        run = (await self._cluster.unless_one_fails(watching)).run
        deadline = time.monotonic() + self._patience
        while any(not family.keys() >= set(PARTS) for family in (await _families(self.agents)).values()):
            assert time.monotonic() < deadline, f"a worker of round {run.round} never started"
            await asyncio.sleep(0.1)
        return run


async def _families(agents: list[Program]) -> dict[int, dict[str, psutil.Process]]:
    """Return each agent's processes by part, by the agent's process id. In a thread: it takes a moment."""
    return await asyncio.to_thread(_sort_out, [agent.pid for agent in agents])


def _sort_out(agents: list[int]) -> dict[int, dict[str, psutil.Process]]:
    found: dict[int, dict[str, psutil.Process]] = {agent: {} for agent in agents}
    agent_of = {agent: agent for agent in agents}
    for each in descendants(os.getpid()):  # parents come before children
        agent = agent_of.setdefault(each.pid, agent_of.get(each.parent, 0))
        if agent and not each.dead:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(each.pid)
                found[agent][_part(process, agent)] = process
    return found


def _part(process: psutil.Process, agent: int) -> str:
    if process.pid == agent:
        return "agent"
    return _NAMES.get(process.name()) or ("worker" if str(WORKER) in process.cmdline() else "other")


def _name(pid: int) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{psutil.Process(pid).name()} ({pid})"
    return str(pid)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        # A process without its parent may be a zombie of this process, which reaps none of them.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _locked(path: Path) -> TextIO:
    """Open a new file, locked against all others while it is open."""
    file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (open for as long as workers are to wait)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
