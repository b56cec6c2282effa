"""One life of an agent: the product's timer socket and client, its host's workers, and a reaper that may fail."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from rallypoint.agent.hangs.hung_worker import HungWorker
from rallypoint.agent.sockets.timers import TimerSocket
from rallypoint.timer.client.client import NodeTimers
from simulation.clockwork import Clockwork, Process
from simulation.network import Link, Network
from simulation.timers.programs import Program, Temper
from simulation.timers.referee import Referee
from simulation.timers.sockets import Line, Listener, ReadingProcess
from simulation.timers.truth import Span, Stillness
from simulation.wire import Channel
from support.host_workers import HostWorkers

RUN = "run"
# Process ids begin above those that a kernel gives out: what the product reads of them in /proc is not there.
_FIRST_PID = 2**22
# How many of all programs use the product's `expires`.
_BY_TABLE = 0.7
# Seconds until the agent hears that a process has started. It may connect before.
_BIRTH_NEWS = 0.1
# Seconds for which a process may take a connection for whole that broke: as long as it need not ring, and some.
_UNNOTICED = 3.0
# Seconds until the agent hears that a worker has died, and until another takes its place.
_NEWS = 0.3
_REPLACED = 1.0


@dataclass(slots=True)
class Reaping:
    """How reapers of a seed are: how often one fails or raises, and how long evidence takes at most, seconds."""

    failing: float
    raising: float
    evidence: float


@dataclass(slots=True, eq=False)
class Worker:
    """A worker: its first process, and those that it forked."""

    worker_id: str
    programs: list[Program] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """Whether it lives."""
        return self.programs[0].process.alive

    def die(self) -> None:
        """All its processes are killed."""
        for program in self.programs:
            program.die()


class _Socket(TimerSocket):
    """The product's, at a door that is simulated."""

    def begin(self, process: ReadingProcess, door: Listener) -> None:
        """What `start` does."""
        process.add_reader(door, self._accept, door)
        self._timers.start(self._judge, self._tables.forget)


class Host(HostWorkers):
    """An agent's life on a host."""

    def __init__(
        self,
        clockwork: Clockwork,
        network: Network,
        referee: Referee,
        chance: random.Random,
        link: Link,
        *,
        name: str,
        life: int,
        lease: int,
        incarnation: str,
        new_process: Callable[[str], ReadingProcess],
        temper: Temper,
        reaping: Reaping,
    ) -> None:
        """Start it without workers.

        Args:
            clockwork: What makes it go.
            network: What it reaches the service by.
            referee: Who is told what happens.
            chance: What decides here.
            link: Its way into the network.
            name: Of the node.
            life: Another number for each life of an agent of any node.
            lease: Of the node; more than in its earlier lives in that incarnation of the run.
            incarnation: Of the run.
            new_process: Starts a process of the host; all have one clock.
            temper: How its workers are.
            reaping: How its reaper is.
        """
        super().__init__()
        self.name = name
        self.link = link
        self.stillness = Stillness()
        self.workers: dict[str, Worker] = {}
        self.lease = lease
        self.incarnation = incarnation
        # Its job is over, and it has not noticed: it starts no worker any more.
        self.over = False
        # The agent of its node in another life of the run.
        self.rival: Host | None = None
        # When a service last heard of all its timers; None: its stream is broken, or what it says is held up.
        self.registered_at: float | None = None
        # When its agent, its network or its service last went on after it had been stopped.
        self.shaken_at = -1e9
        self._clockwork = clockwork
        self._referee = referee
        self._chance = chance
        self._new_process = new_process
        self._temper = temper
        self._reaping = reaping
        self._life = life
        self._born = 0
        self._pids = count(_FIRST_PID)
        self.process = new_process(f"{name}#{life}/agent")
        channel: Any = Channel(self.process, link, network)
        self.client = NodeTimers(
            channel,
            run_id=RUN,
            node_id=name,
            lease=lease,
            incarnation=incarnation,
            clock=self.process.time,
            jitter=chance.random,
        )
        self.door = Listener()
        self.socket = _Socket("", self.client, self, clock=self.process.time)
        self.process.call_soon(self.socket.begin, self.process, self.door)

    def connect(self, pid: int) -> Line:
        if not self.process.alive:
            raise ConnectionRefusedError
        line = Line(pid)
        self.door.knock(line)
        return line

    def now(self) -> float:
        """The world's time."""
        return self._clockwork.now

    @property
    def programs(self) -> list[Program]:
        """All processes of its workers, the dead ones included."""
        return [program for worker in self.workers.values() for program in worker.programs]

    def guards(self, span: Span, *, all_along: bool = False) -> bool:
        worker = self.workers.get(span.worker_id)
        if worker is None or not self.process.alive:
            return False
        program = next(each for each in worker.programs if each.pid == span.pid)
        return program.guarded and not (all_along and program.cut_off_at > span.since - _UNNOTICED)

    # ---- workers

    def start_worker(self) -> None:
        """Start one more."""
        if not self.process.alive or self.over:
            return
        self._born += 1
        worker = Worker(f"{self.name}.{self._life}.{self._born}")
        self.workers[worker.worker_id] = worker
        self._referee.note("worker", worker.worker_id)
        self._start_program(worker)

    def fork(self, worker: Worker) -> None:
        """One of its processes forks."""
        if worker.alive:
            self._start_program(worker)

    def _start_program(self, worker: Worker) -> None:
        pid = next(self._pids)
        process = self._new_process(f"{worker.worker_id}/{len(worker.programs)}")
        by_table = self._chance.random() < _BY_TABLE
        program = Program(
            worker.worker_id, pid, process, self, self._referee, self._temper, self._chance, by_table
        )
        if self.stillness.standing:
            program.process.pause()
        worker.programs.append(program)
        program.start()
        delay = self._chance.choice([0.0, self._chance.uniform(0.0, _BIRTH_NEWS)])
        self._clockwork.after(delay, self.process.call_soon, self._introduce, worker, pid)

    def _introduce(self, worker: Worker, pid: int) -> None:
        if worker.alive:
            self.pids[pid] = worker.worker_id
            self.socket.introduce()

    def lose_worker(self, worker: Worker) -> None:
        """A worker dies, whoever killed it; after a while the agent hears of it."""
        if not worker.alive:
            return
        self._referee.note("gone", worker.worker_id)
        worker.die()
        self._clockwork.after(self._chance.uniform(0.0, _NEWS), self._hear_of, worker)

    def _hear_of(self, worker: Worker) -> None:
        self.process.call_soon(self._clear, worker)

    def _clear(self, worker: Worker) -> None:
        for program in worker.programs:
            self.pids.pop(program.pid, None)
        self.socket.clear(worker.worker_id)
        del self.workers[worker.worker_id]
        if not self._temper.steady:
            self._clockwork.after(self._chance.uniform(0.0, _REPLACED), self.start_worker)

    # ---- reaping

    def worker_of(self, pid: int) -> str | None:
        """One of those that were introduced."""
        return self.pids.get(pid)

    def rank_of(self, worker: str) -> int | None:
        """Unknown: progress is not simulated."""
        return None

    async def reap(self, hang: HungWorker) -> bool | None:
        """Take its time, and fail at times."""
        referee, chance, reaping = self._referee, self._chance, self._reaping
        referee.reap_asked(self, hang)
        try:
            await asyncio.sleep(chance.uniform(0.0, reaping.evidence))
            if not self._temper.steady and chance.random() < reaping.failing:
                referee.note("reap failed", hang.worker_id, hang.scope)
                self.shaken_at = max(self.shaken_at, self.now())
                return False
            worker = self.workers.get(hang.worker_id)
            if worker is not None:
                self.lose_worker(worker)
            if chance.random() < reaping.raising:
                raise OSError("simulated: the report could not be written")
            return True
        finally:
            referee.reap_over(self, hang)

    # ---- what befalls it

    def stop(self) -> None:
        """The whole host stands still."""
        self.stillness.begin(self.now())
        for process in self._those():
            process.pause()

    def go_on(self, arrivals_first: bool) -> None:
        """The host goes on."""
        self.stillness.end(self.now())
        for process in self._those():
            resume(process, arrivals_first)

    def _those(self) -> list[Process]:
        live = [program.process for program in self.programs if program.process.alive]
        return [self.process, *live]

    def outlive_its_job(self) -> None:
        """Its workers are gone, and it goes on for a while."""
        self.over = True
        for worker in list(self.workers.values()):
            self.lose_worker(worker)

    def renew(self, lease: int, incarnation: str) -> None:
        """The node gets another lease."""
        self.lease, self.incarnation, self.registered_at = lease, incarnation, None
        self.process.call_soon(self.client.renew, lease, incarnation)

    @property
    def rivals(self) -> bool:
        return self.rival is not None and self.rival.process.alive

    def crash(self) -> None:
        """The agent is killed, and its spawner takes the workers down."""
        self.process.kill()
        self._referee.agent_died(self)
        for worker in self.workers.values():
            worker.die()


def resume(process: Process, arrivals_first: bool) -> None:
    """Let a process go on. What has arrived meanwhile comes before or after what has fallen due: as loops differ."""
    if arrivals_first:
        process.parked.sort(key=lambda handle: "_fire" in getattr(handle.callback, "__name__", ""))
    process.resume()
