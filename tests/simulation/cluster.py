"""A cluster in one process: a service with its disk, the nodes of a run, a watcher, an operator, and a network."""

from __future__ import annotations

import random
from typing import Any

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.core.state import Phase
from rallypoint.rendezvous.journal.codec import DecodedRecord
from rallypoint.rendezvous.journal.journal import Record
from rallypoint.rendezvous.state.core import SPACE
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rendezvous.core.ledger import require
from simulation.clockwork import SKEW, Clockwork, Process
from simulation.cpu import Cpu
from simulation.disk import Disk
from simulation.network import Link, Network
from simulation.node import Environment, Node
from simulation.onlookers import Onlooker, Operator, Reader, Watcher
from simulation.plan import RUN, Plan
from simulation.referee import Group, Referee
from simulation.server import WALL_TIME, Server
from simulation.store_clients import StoreUser
from simulation.terms import Terms
from simulation.wire import Channel


class Cluster:
    """All parts of one seed's simulation; `trace` lists the events."""

    judged_by = Referee

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.chance = self._stream("faults")
        self.clockwork = Clockwork(self._stream("ties"), plan.most_steps)
        self.trace: list[tuple[float, str, tuple[Any, ...]]] = []
        self.terms = Terms(lambda: self.clockwork.now)
        self.referee = self.judged_by(
            self.note, self.clockwork.after, lambda: self.clockwork.now, terms=self.terms
        )
        self.network = Network(self.clockwork, self._stream("network"))
        self.referee.store.now = lambda: self.clockwork.now
        self.referee.on_started = self._use_store
        self.referee.on_stopped = self._leave_store
        self.disk = Disk(
            self.clockwork,
            self._stream("disk"),
            self._durable,
            self.referee.forgotten,
            self.referee.store.durable,
            self.note,
        )
        self._draw = self._stream("draw")
        self._kinds = self._stream("kinds")
        # Users of the store, by the group of their workers.
        self._users: dict[Group, StoreUser] = {}
        self.around = Environment(
            self.clockwork,
            self.network,
            self.referee,
            self._stream("workers"),
            plan.fates,
            self._writable_round,
            self.to_service,
            self.links_to_service,
        )
        self.processes: list[Process] = []
        self.nodes: list[Node] = []
        self.links: list[Link] = []
        self.server: Server | None = None
        self.calm = False
        # True if a scheduler starts nodes of a closed run until the run is open.
        self.requeued = False
        # Seconds for which to stop the service after the next failure report of a worker is durable; 0: do not stop it.
        self.ambush = 0.0
        # Names of the actions that were applied.
        self.struck: set[str] = set()
        self._skew = self._stream("clocks")
        # Wall clocks differ by up to two seconds, and that of a server is set now and then.
        self._wall_offset = self._skew.uniform(-600, 600)
        # Seconds by which it was set since the last start of a server.
        self._clock_set = 0.0
        self._lives = 0
        self._lives_of_workers = 0
        self.start_server()
        self.onlookers: list[Onlooker] = [
            kind(self.new_process(name), self.new_link(name), self.network, self.referee)
            for kind, name in ((Watcher, "watcher"), (Reader, "reader"))
        ]
        self.operator = Operator(
            self.new_process("operator"), self.new_link("operator"), self.network, self.referee
        )
        for number in range(plan.store_clients):
            name = f"client{number}"
            self._new_user(self.new_process(name), self.new_link(name))

    def _stream(self, purpose: str) -> random.Random:
        return random.Random(f"{self.plan.seed}/{purpose}")

    def note(self, what: str, *details: Any) -> None:
        """Add an entry to the trace."""
        self.trace.append((self.clockwork.now, what, details))

    def new_process(self, name: str) -> Process:
        """Start a process, with a random clock rate and offset."""
        skew = self._skew
        process = Process(
            self.clockwork,
            name,
            self.referee.unforeseen,
            rate=skew.uniform(1 - SKEW, 1 + SKEW),
            offset=skew.uniform(0.0, 1e6),
        )
        self.processes.append(process)
        return process

    def new_link(self, name: str) -> Link:
        """Create the link of a host."""
        link = Link(name, self.chance.choice([0.0005, 0.002, 0.02]))
        self.links.append(link)
        return link

    def to_service(self, process: Process, link: Link) -> Any:
        """Return the client object of a process for the service: a `Channel`; with replicas, a `ReplicaClient`."""
        return Channel(process, link, self.network)

    def links_to_service(self, process: Process, link: Link) -> list[Link]:
        """Return the links between a process and the service."""
        return [link]

    # ---- the service

    def _durable(self, record: Record, decided_at: float) -> None:
        ledger = self.referee.ledger(record.run_id)
        terms = ledger.leases, ledger.settings.time_to_live
        with self.referee.judging():
            self.terms.durable(self.server, *terms, decided_at)
        self._check_store(record)
        self.referee.durable(record, decided_at)
        self._spring(record)

    def _check_store(self, record: Record) -> None:
        """Check that the store of a run is empty at its start, also when a closed run is opened again."""
        if DecodedRecord(record.content).fact_name == "run_created":
            kept = [key for key in self.disk.values if key[0] == record.run_id and key[1] != SPACE]
            with self.referee.judging():
                require(not kept or record.revision == 1, "a run that is opened again has an empty store")

    def _spring(self, record: Record) -> None:
        """Stop the service soon if `ambush` is set and the record is a worker's failure."""
        if self.ambush and DecodedRecord(record.content).fact_name == "worker_failed":
            seconds, self.ambush = self.ambush, 0.0
            if (process := self.serving) is not None:
                self.clockwork.after(0.02, self.pause, process, seconds)

    @property
    def serving(self) -> Process | None:
        """The process that serves the run; None if there is none."""
        return None if self.server is None else self.server.process

    def start_server(self) -> None:
        """Start the service from its durable records."""
        if self.server is not None:
            return
        process = self.new_process(f"server{len(self.processes)}")
        wall_offset = self._skew.uniform(-1.0, 1.0)
        process.cpu = Cpu(self.clockwork, process, self.plan.costs)
        self.note("start", process.name)
        self.referee.ledger(RUN).server_started(self.clockwork.now)
        # The times of restarts are read from a wall clock that was set in the meantime.
        self.referee.ledger(RUN).clock_jumps += self._clock_set
        self._clock_set = 0.0
        self.server = Server(
            process,
            self.disk,
            self.referee,
            limits=self.plan.limits,
            wall_clock=lambda: WALL_TIME + wall_offset + self._wall_offset + self.clockwork.now,
            draw=self._draw.randbytes,
            on_ready=self._serves,
            on_exit=self._server_ended,
        )

    def _serves(self, server: Server) -> None:
        self.network.listener = server

    def _server_ended(self, server: Server) -> None:
        self.end_server(silently=False)

    def end_server(self, *, silently: bool) -> None:
        """End the service's process, and start the next one soon."""
        server, self.server = self.server, None
        if server is None:
            return
        self.note("end", server.process.name)
        server.process.kill()
        server.journal.lose()
        self.network.listener = None
        self.network.died(server.process, silently=silently)
        self.clockwork.after(self.chance.choice([0.05, 0.5, 3.0, 8.0]), self.start_server)

    def set_clock(self, seconds: float) -> None:
        """Change the wall clock of the service's host by `seconds`."""
        self.note("clock", seconds)
        self._wall_offset += seconds
        self._clock_set += abs(seconds)

    def _writable_round(self, run_id: str) -> int | None:
        return self.server.writable_round(run_id) if self.server is not None else None

    # ---- users of the store

    def _new_user(self, process: Process, link: Link, group: Group | None = None) -> StoreUser:
        chance = self._stream(f"store/{process.name}")
        where, every = self.to_service(process, link), self.plan.store_pace
        return StoreUser(process, where, chance, RUN, every=every, leases=self._leases, group=group)

    def _leases(self) -> list[Writer]:
        """Return the leases that agents hold, as far as they know."""
        held = [(node.node_id, node.membership.held) for node in self.alive]
        return [Writer(node_id, lease.number, lease.token) for node_id, lease in held if lease is not None]

    def _use_store(self, group: Group, link: Link) -> None:
        """Workers start: if the plan has users of the store, start one for them, in a process of its own."""
        if self.plan.store_clients:
            self._lives_of_workers += 1
            process = self.new_process(f"{group.node_id}.workers{self._lives_of_workers}")
            self._users[group] = self._new_user(process, link, group)

    def _leave_store(self, group: Group) -> None:
        """Workers are gone: end their user of the store."""
        user = self._users.pop(group, None)
        if user is not None:
            user.process.kill()
            self.network.died(user.process, silently=False)

    # ---- nodes

    @property
    def alive(self) -> list[Node]:
        """Nodes whose agent process is alive."""
        return [node for node in self.nodes if node.process.alive]

    def start_node(self, node_id: str, link: Link | None = None) -> None:
        """Start an agent under a name, even if another agent has that name."""
        if self._lives >= self.plan.most_lives and not self.calm:
            return
        self._lives += 1
        chance = self.chance
        request = pb.JoinRun(
            run_id=RUN,
            node_id=node_id,
            settings=self.plan.settings,
            stays_until_gone=self._kinds.random() < 0.85,
            address=f"{node_id}.cluster",
            local_world_size=chance.choice([1, 2, 4]),
            role=chance.choice(["trainer", "evaluator"]),
            topology=chance.choice(["", "rack1", "rack1/switch2", "rack2"]),
        )
        process = self.new_process(f"{node_id}#{self._lives}")
        self.note("start", process.name)
        link = link or self.new_link(node_id)
        self.nodes.append(Node(self.around, process, link, request, self._stream(process.name)))

    def pause(self, process: Process, seconds: float, *, suspended: bool = False) -> None:
        """Stop a process for `seconds`; `suspended`: with its host, whose clock stands still."""
        if process.paused or not process.alive:
            return
        self.note("suspend" if suspended else "pause", process.name, round(seconds, 2))
        self.referee.paused(seconds)
        process.pause(suspended=suspended)
        self.network.paused(process)
        self.clockwork.after(seconds, self.resume, process)

    def resume(self, process: Process) -> None:
        """Continue a process."""
        if process.paused:
            self.note("resume", process.name)
            process.resume()
            self.network.resumed(process)

    def heal(self, link: Link) -> None:
        """Let a link work again."""
        if not link.whole:
            self.note("heal", link.name)
            self.network.heal(link)

    def end_stall(self, link: Link) -> None:
        """Stop delaying the connections that are made from now on."""
        link.stalled = 0.0

    # ---- the end of all faults

    def calm_down(self) -> None:
        """End all faults: repair everything that is broken, and start missing nodes again."""
        self.note("calm")
        self.calm = True
        self.ambush = 0.0
        self.around.fates.steady = True
        self.disk.latency, self.disk.failing = 0.002, 0.0
        for link in self.links:
            link.latency = min(link.latency, 0.02)
            self.heal(link)
            self.end_stall(link)
        for process in self.processes:
            self.resume(process)
        self.start_server()
        self._keep_up()

    def _keep_up(self) -> None:
        """Act as operators and schedulers do: readmit nodes, and replace missing nodes up to `min_nodes`."""
        self.clockwork.after(2.0, self._keep_up)
        if self.over and not self.requeued:
            return
        for node_id in sorted(self.referee.ledger(RUN).evicted):
            self.operator.readmit_node(node_id)
        live = [node.node_id for node in self.alive if node.live]
        missing = [node_id for node_id in self.plan.node_ids if node_id not in live]
        while missing and len(live) < self.plan.settings.min_nodes:
            node_id = missing.pop()
            self.start_node(node_id)
            live.append(node_id)

    @property
    def over(self) -> bool:
        """True if the run is over and will not be opened again."""
        return self.referee.ledger(RUN).over

    def settled(self) -> bool:
        """Return True if all live nodes agree on a running round, or all nodes have left a closed run."""
        ledger = self.referee.ledger(RUN)
        if self.server is None:
            return False
        if not ledger.forgotten and any(each.revision != ledger.revision for each in self.onlookers):
            return False
        if ledger.over:
            return not self.alive and not self.referee.groups
        if ledger.phase is not Phase.FINAL:
            return False
        round_ = ledger.rounds[ledger.round]
        return round_.started and self._agree(ledger.round, dict(round_.leases))

    def _agree(self, round_: int, seats: dict[str, int]) -> bool:
        for node in self.alive:
            if not node.live:
                return False
            seated = seats.get(node.node_id) == node.membership.lease
            if seated:
                del seats[node.node_id]
            known = node.state.assignment.round if node.state.assignment is not None else 0
            if node.state.phase.name != "FINAL" or known != (round_ if seated else 0):
                return False
            if seated and node.runs != round_:
                return False
        succeeded = self.referee.ledger(RUN).rounds[round_].succeeded
        return set(seats) <= succeeded

    def dispose(self) -> None:
        """Dispose of all processes."""
        for process in self.processes:
            process.alive = False
        for process in self.processes:
            process.dispose()
