"""Two healthy nodes and a third that joins, dies and joins again, for as long as the test likes; on a simulated clock.

It drives the core only by its commands, leases, `settle` and `next_deadline`, and measures the time in which the
healthy nodes' workers run.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count

from rallypoint.rendezvous.core import apply, commands, decide, facts
from rallypoint.rendezvous.core.commands import Refused
from rallypoint.rendezvous.core.state import Phase, ReportedFailure, RunSettings, RunState

HEALTHY = ("a", "b")
# Seconds that an agent takes to stop its workers and to confirm.
_TO_CONFIRM = 0.5
# Seconds from the death of a worker to that of its peers, which lose a connection.
_TO_FAIL_OF_IT = 0.05


class Ending(Enum):
    """The end of each life of the joiner."""

    KILLED_AT_ONCE = "its agent is killed a second after it joined"
    KILLED_UNCONFIRMED = "its agent is killed when it got a place, before it confirms"
    KILLED_RUNNING = "its agent is killed half a second after its workers started"
    KILLED_AND_PEERS_FAIL = "the same, and the workers of the others lose their connections to it"
    WORKER_CRASHES = "its worker fails half a second after each start; its agent stays until it is taken out"
    LEAVES_AT_ONCE = "it leaves in good order a second after it joined"
    LEAVES_RUNNING = "it leaves in good order half a second after its workers started"


@dataclass(eq=False, slots=True)
class Process:
    """One life of one agent."""

    node_id: str
    lease: int
    crashes: bool
    alive: bool = True


class CrashLoop:
    """See the module. `running` is the time for which the healthy nodes' workers ran, in seconds."""

    def __init__(self, settings: RunSettings, ending: Ending, every: float, *, fresh_names: bool) -> None:
        """Start nothing yet.

        Args:
            settings: The settings of the run.
            ending: The end of each life of the joiner.
            every: Seconds between two starts of the joiner; none is started while one lives.
            fresh_names: Each life has a node name of its own.
        """
        self.state = RunState("run")
        self.settings = settings
        self.now = 1000.0
        self.running = 0.0
        self.lives = 0
        self.refused = 0
        self.facts: list[facts.Fact] = []
        self._ending = ending
        self._every = every
        self._fresh_names = fresh_names
        self._processes: dict[str, Process] = {}
        self._joiner: Process | None = None
        self._broken_round = 0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def start_healthy(self) -> None:
        """Start the healthy nodes, and let time pass until their workers run."""
        for node_id in HEALTHY:
            self.join(node_id)
        while self.state.phase is not Phase.FINAL:
            self._step(self.now + 1.0)
        self.running = 0.0

    def start_joining(self) -> None:
        """Start the joiner now, and repeatedly from here on."""
        self._tick()

    def join(self, node_id: str, *, crashes: bool = False) -> Process | None:
        """Start an agent, which stays unless it `crashes`; None: it is refused."""
        join = commands.Join(node_id, self.settings, f"{node_id}.cluster", 1, "trainer")
        joined = self._carry_out(join)
        if joined is None:
            return None
        lease = next(fact.lease for fact in joined if isinstance(fact, facts.NodeJoined))
        process = self._processes[node_id] = Process(node_id, lease, crashes)
        self._beat(process)
        return process

    def pass_time(self, seconds: float) -> None:
        """Let time pass; everything that is due meanwhile happens at its time."""
        until = self.now + seconds
        while self.now < until:
            self._step(until)

    @property
    def seated(self) -> set[str]:
        """The nodes whose workers run."""
        return set(self.state.seats) if self.state.phase is Phase.FINAL else set()

    # ---- time

    def _step(self, until: float) -> None:
        """Advance to the time of the next event, and process it."""
        deadline = decide.next_deadline(self.state)
        assert deadline is None or deadline > self.now, "the run is settled"
        due = self._agenda[0][0] if self._agenda else until
        then = min(until, due, until if deadline is None else deadline)
        if set(HEALTHY) <= self.seated and self.state.round != self._broken_round:
            self.running += then - self.now
        self.now = then
        while self._agenda and self._agenda[0][0] <= self.now:
            heapq.heappop(self._agenda)[2]()
        self._react(decide.settle(self.state, self.now))

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    # ---- agents

    def _carry_out(self, command: commands.Command) -> list[facts.Fact] | None:
        """Carry a command out, and let all agents react; None: it is refused."""
        try:
            happened = decide.execute(self.state, command, self.now)
        except Refused:
            self.refused += 1
            return None
        # A joiner must be known before it gets an assignment.
        self._after(0.0, lambda: self._react(happened))
        return happened

    def _react(self, happened: list[facts.Fact]) -> None:
        self.facts += happened
        for fact in happened:
            match fact:
                case facts.RoundFrozen(round=round_, seats=seats):
                    for seat in seats:
                        self._take_seat(self._processes[seat.node_id], round_)
                case facts.RoundFinalized(round=round_):
                    for node_id in self.state.seats:
                        self._run_workers(self._processes[node_id], round_)
                case facts.NodeEvicted(node_id=node_id):
                    self._processes[node_id].alive = False

    def _beat(self, process: Process) -> None:
        if not self._holds_lease(process):
            return
        apply.renew(self.state, process.node_id, self.now)
        self._after(self.settings.keep_alive_interval, lambda: self._beat(process))

    def _holds_lease(self, process: Process) -> bool:
        node = self.state.nodes.get(process.node_id)
        return process.alive and node is not None and node.lease == process.lease

    def _take_seat(self, process: Process, round_: int) -> None:
        if process.crashes and self._ending is Ending.KILLED_UNCONFIRMED:
            self._after(_TO_CONFIRM / 2, lambda: self._kill(process))
            return
        confirm = commands.Confirm(process.node_id, process.lease, round_, 29500)
        self._after(_TO_CONFIRM, lambda: self._send(process, confirm))

    def _run_workers(self, process: Process, round_: int) -> None:
        if not process.crashes:
            return
        match self._ending:
            case Ending.KILLED_RUNNING | Ending.KILLED_AND_PEERS_FAIL:
                self._after(0.5, lambda: self._kill(process))
            case Ending.WORKER_CRASHES:
                self._after(0.5, lambda: self._fail(process, round_, "CUDA error"))
            case Ending.LEAVES_RUNNING:
                self._after(0.5, lambda: self._leave(process))

    def _send(self, process: Process, command: commands.Command) -> None:
        if self._holds_lease(process):
            self._carry_out(command)

    def _fail(self, process: Process, round_: int, message: str) -> None:
        """Report that a worker of the process failed; the consequences for other nodes are not reported."""
        seat = self.state.seats.get(process.node_id)
        if self.state.phase is not Phase.FINAL or self.state.round != round_ or seat is None:
            return
        failure = ReportedFailure(
            round_, seat.base_rank, 0, "trainer", process.node_id, "host", 4711, 1, 1.7e9, message, "", ""
        )
        self._send(process, commands.ReportFailure(process.node_id, process.lease, failure))

    def _kill(self, process: Process) -> None:
        if not self._holds_lease(process):
            process.alive = False
            return
        process.alive = False
        apply.disconnect(self.state, process.node_id, self.now)
        if process.node_id not in self.seated:
            return
        # Their workers wait for a process that is gone.
        self._broken_round = broken = self.state.round
        if self._ending is Ending.KILLED_AND_PEERS_FAIL:
            for node_id in HEALTHY:
                fail = partial(self._fail, self._processes[node_id], broken, "connection reset by peer")
                self._after(_TO_FAIL_OF_IT, fail)

    def _leave(self, process: Process) -> None:
        self._send(process, commands.Depart(process.node_id, process.lease, "its agent was stopped"))
        self._after(_TO_CONFIRM, lambda: self._go(process))

    def _go(self, process: Process) -> None:
        self._send(process, commands.Leave(process.node_id, process.lease, "its agent was stopped"))
        process.alive = False

    # ---- the joiner

    def _tick(self) -> None:
        self._after(self._every, self._tick)
        if self._joiner is not None and self._joiner.alive:
            return
        self.lives += 1
        name = f"joiner{self.lives}" if self._fresh_names else "joiner"
        process = self._joiner = self.join(name, crashes=True)
        if process is None:
            return
        match self._ending:
            case Ending.KILLED_AT_ONCE:
                self._after(1.0, lambda: self._kill(process))
            case Ending.LEAVES_AT_ONCE:
                self._after(1.0, lambda: self._leave(process))
