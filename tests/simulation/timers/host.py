"""One process of an agent: the product's timer socket and client, its host's workers, and a reaper that may fail."""

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
# Process ids begin above the kernel's maximum: the product finds none of them in /proc.
_FIRST_PID = 2**22
# Share of the programs that use the product's `expires`.
_BY_TABLE = 0.7
# Longest delay in seconds until the agent learns that a process has started. The process may connect before.
_BIRTH_NEWS = 0.1
# Seconds for which a process may not notice a broken connection: while it need not send a wake-up, and a margin.
_UNNOTICED = 3.0
# Longest delays in seconds until the agent learns that a worker has died, and until another replaces it.
_NEWS = 0.3
_REPLACED = 1.0


@dataclass(slots=True)
class Reaping:
    """The reapers of a seed: chance of a failure and of an exception, and the longest diagnosis in seconds."""

    failing: float
    raising: float
    evidence: float


@dataclass(slots=True, eq=False)
class Worker:
    """A worker: its first process, and its forked ones."""

    worker_id: str
    programs: list[Program] = field(default_factory=list)

    @property
    def alive(self) -> bool:
        """True if its first process is alive."""
        return self.programs[0].process.alive

    def die(self) -> None:
        """Kill all its processes."""
        for program in self.programs:
            program.die()


class _Socket(TimerSocket):
    """The product's socket, over a simulated listener."""

    def begin(self, process: ReadingProcess, door: Listener) -> None:
        """Start it, as `start` does."""
        process.add_reader(door, self._accept, door)
        self._timers.start(self._judge, self._tables.forget)


class Host(HostWorkers):
    """An agent on a host, with its workers."""

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
        """Start the agent without workers.

        Args:
            clockwork: Runs its callbacks.
            network: Connects it to the service.
            referee: Receives the real events.
            chance: The source of its random choices.
            link: The host's link to the service.
            name: The id of the node.
            life: The number of this agent process, unique among all nodes.
            lease: The node's lease; higher than its earlier ones in that incarnation of the run.
            incarnation: The incarnation of the run.
            new_process: Starts a process of the host; all have one clock.
            temper: The behaviour of its workers.
            reaping: The behaviour of its reaper.
        """
        super().__init__()
        self.name = name
        self.link = link
        self.stillness = Stillness()
        self.workers: dict[str, Worker] = {}
        self.lease = lease
        self.incarnation = incarnation
        # True if its job is over and the agent still runs: it starts no more workers.
        self.over = False
        # The agent of its node in another incarnation of the run.
        self.rival: Host | None = None
        # The time at which a service last had all its timers; None: its stream is broken, or its messages are delayed.
        self.registered_at: float | None = None
        # The time at which its agent, its network or its service last continued after a pause.
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
        """Return the world's time, in seconds."""
        return self._clockwork.now

    @property
    def programs(self) -> list[Program]:
        """All processes of its workers, including dead ones."""
        return [program for worker in self.workers.values() for program in worker.programs]

    def guards(self, span: Span, *, all_along: bool = False) -> bool:
        worker = self.workers.get(span.worker_id)
        if worker is None or not self.process.alive:
            return False
        program = next(each for each in worker.programs if each.pid == span.pid)
        return program.guarded and not (all_along and program.cut_off_at > span.since - _UNNOTICED)

    # ---- workers

    def start_worker(self) -> None:
        """Start another worker."""
        if not self.process.alive or self.over:
            return
        self._born += 1
        worker = Worker(f"{self.name}.{self._life}.{self._born}")
        self.workers[worker.worker_id] = worker
        self._referee.note("worker", worker.worker_id)
        self._start_program(worker)

    def fork(self, worker: Worker) -> None:
        """Fork a process of a worker."""
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
        """Kill a worker, for any cause; after a while the agent receives its exit."""
        if not worker.alive:
            return
        self._referee.note("gone", worker.worker_id)
        worker.die()
        self._clockwork.after(self._chance.uniform(0.0, _NEWS), self._report_exit, worker)

    def _report_exit(self, worker: Worker) -> None:
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
        """Return the worker of a process that the agent knows."""
        return self.pids.get(pid)

    def rank_of(self, worker: str) -> int | None:
        """Return None: progress is not simulated."""
        return None

    async def reap(self, hang: HungWorker) -> bool | None:
        """Reap a worker after a delay; fail or raise at random."""
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

    # ---- its faults

    def stop(self) -> None:
        """Pause the whole host."""
        self.stillness.begin(self.now())
        for process in self._those():
            process.pause()

    def go_on(self, messages_first: bool) -> None:
        """Continue the host."""
        self.stillness.end(self.now())
        for process in self._those():
            resume(process, messages_first)

    def _those(self) -> list[Process]:
        live = [program.process for program in self.programs if program.process.alive]
        return [self.process, *live]

    def outlive_its_job(self) -> None:
        """End the job: its workers are gone, and the agent runs on for a while."""
        self.over = True
        for worker in list(self.workers.values()):
            self.lose_worker(worker)

    def renew(self, lease: int, incarnation: str) -> None:
        """Give the node a new lease."""
        self.lease, self.incarnation, self.registered_at = lease, incarnation, None
        self.process.call_soon(self.client.renew, lease, incarnation)

    @property
    def rivals(self) -> bool:
        return self.rival is not None and self.rival.process.alive

    def crash(self) -> None:
        """Kill the agent; its spawner kills the workers."""
        self.process.kill()
        self._referee.agent_died(self)
        for worker in self.workers.values():
            worker.die()


def resume(process: Process, messages_first: bool) -> None:
    """Continue a process. It handles received messages before or after due timers, since event loops differ in that."""
    if messages_first:
        process.parked.sort(key=lambda handle: "_fire" in getattr(handle.callback, "__name__", ""))
    process.resume()
