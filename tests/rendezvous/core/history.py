"""A random history of one run: nodes join, leave, hang and fail; a server crashes; time passes.

The core is the real one. Around it stands a model of the engine (facts are sent once they are committed, and a
crash loses the others), of agents, and of watchers. The `Ledger` checks the invariants.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from rallypoint.rendezvous.core import apply as leases
from rallypoint.rendezvous.core import commands, facts, starts
from rallypoint.rendezvous.core import decide as core
from rallypoint.rendezvous.core.apply import apply
from rallypoint.rendezvous.core.commands import SERVICE, LeaseLost, NodeIsEvicted, Refused, RunIsClosed
from rallypoint.rendezvous.core.decide import check_lease, check_revision
from rallypoint.rendezvous.core.snapshot import restore, take_reopened, take_snapshot, take_tombstone
from rallypoint.rendezvous.core.starts import StartReport
from rallypoint.rendezvous.core.state import (
    Phase,
    RankPolicy,
    RecoveryParts,
    Reopen,
    ReportedFailure,
    RoundEndCause,
    RunSettings,
    RunState,
    ScaleUpPolicy,
)
from rallypoint.rendezvous.journal.codec import DecodedRecord, decode_snapshot, encode_record, encode_snapshot
from rallypoint.rendezvous.runs.run import node_update, run_message
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rendezvous.core.actors import Agent, Watcher
from rendezvous.core.ledger import Ledger, Violation, require

RUN = "run"
NAMES = [f"node{number}" for number in (1, 2, 3, 9, 10, 11)]
# The server's wall clock minus its monotonic clock; both go on while it is away.
TO_WALL = 1.7e9
TOLD_TO_NODES = (
    facts.RoundFrozen,
    facts.RoundFinalized,
    facts.RoundEnded,
    facts.ExitBarrierPassed,
    facts.RunClosed,
    facts.NodeLost,
)


@dataclass(slots=True)
class Server:
    """One life of the server: its memory, and its uncommitted facts."""

    state: RunState
    # With the time at which each was decided.
    uncommitted: list[tuple[facts.Fact, float]] = field(default_factory=list)
    answers: list[Callable[[], None]] = field(default_factory=list)
    members: dict[str, Agent] = field(default_factory=dict)
    watchers: list[Watcher] = field(default_factory=list)
    # Members were notified that the end of the round settles.
    settling: bool = False
    # The snapshot with which the closed run begins again, until that is committed.
    reopening: bytes | None = None


class History:
    """A history that is drawn from a seed, step by step; `trace` records the steps and facts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        min_nodes = self.random.choice([1, 1, 2, 3])
        self.settings = RunSettings(
            min_nodes=min_nodes,
            max_nodes=min_nodes + self.random.randrange(3),
            max_restarts=self.random.choice([0, 2, 100]),
            restart_window=self.random.choice([0.0, 40.0]),
            max_restarts_per_node=self.random.choice([0, 1]),
            restart_backoff=self.random.choice([0.0, 4.0, 30.0]),
            join_timeout=60.0,
            last_call_timeout=self.random.choice([0.0, 10.0]),
            confirm_timeout=20.0,
            scale_up_policy=self.random.choice(list(ScaleUpPolicy)),
            scale_up_delay=self.random.choice([2.0, 30.0]),
            exit_barrier_timeout=self.random.choice([1.0, 300.0]),
            rank_policy=self.random.choice(list(RankPolicy)),
            reopen=self.random.choice([Reopen.FAILED, Reopen.FAILED, Reopen.NEVER, Reopen.ALWAYS]),
        )
        self.weights = self.STEPS | (self.OF_BAD_WORKERS if self.random.random() < 0.4 else {})
        self.now = 1000.0
        self.journal: list[bytes] = []
        self.checkpoint: bytes | None = None
        # The tombstone of the run's earlier life, if it had one that expired.
        self.tombstone: bytes | None = None
        self.settings = replace(
            self.settings,
            max_restarts_per_node=min(self.settings.max_restarts_per_node, self.settings.max_restarts),
        )
        self.ledger = Ledger()
        self.ledger.at_most_late = 5.0
        self.server = Server(RunState(RUN))
        # By the latest facts, committed or not: the leases in the server's memory.
        self.held: dict[str, int] = {}
        # The leases at the end of a closed run, of nodes that have not left yet.
        self.lingering: dict[str, int] = {}
        self.evicted: set[str] = set()
        # The nodes whose stream the server knows to be broken, and the participants that are to run, or do.
        self.broken: set[str] = set()
        self.at_work: set[str] = set()
        # A sign of life came that the run may have waited for.
        self.due = False
        self.agents: dict[str, Agent] = {}
        self.stale: list[tuple[str, int]] = []
        self.watchers = [Watcher(), Watcher()]
        self.trace: list[str] = []

    # ---- the server

    def _take_note(self, happened: list[facts.Fact]) -> None:
        self.server.uncommitted += [(fact, self.now) for fact in happened]
        for fact in happened:
            self.trace.append(f"    {fact}")
            self._check_streams(fact)
            match fact:
                case facts.NodeJoined(node_id=node_id, lease=lease):
                    self.held[node_id] = lease
                case facts.NodeLost(node_id=node_id) | facts.NodeLeft(node_id=node_id):
                    del self.held[node_id]
                case facts.NodeEvicted(node_id=node_id):
                    self.held.pop(node_id, None)
                    self.evicted.add(node_id)
                case facts.NodeReadmitted(node_id=node_id):
                    self.evicted.discard(node_id)
                case facts.RunClosed():
                    self.lingering, self.held = dict(self.held), {}
                case facts.RunCreated(reopened=True):
                    self._check_gone()
                    self.lingering.clear()
                    self.evicted = set(self.server.state.evicted)

    def _check_gone(self) -> None:
        """Check that no node is left of the incarnation that ended, as far as the server can know."""
        for node_id, lease in self.lingering.items():
            agent = self.server.members.get(node_id)
            there = agent is not None and agent.lease == lease and agent.stays
            silent = agent is None or self.now >= agent.seen_at + self.settings.time_to_live
            require(not there or silent, "no two incarnations of a run are there at once")

    def execute(self, command: commands.Command) -> list[facts.Fact] | None:
        """Carry a command out; None: it was refused, which is sent like every reply when all is durable."""
        revision = self.server.state.revision
        shown = getattr(command, "lease", None)
        holds = self.lingering if isinstance(command, commands.Leave) and not self.held else self.held
        stale = shown is not None and holds.get(getattr(command, "node_id", "")) != shown
        try:
            happened = core.execute(self.server.state, command, self.now)
        except Refused as refusal:
            require(stale or not isinstance(refusal, LeaseLost), "a lease that stands is honoured")
            barred = getattr(command, "node_id", "") in self.evicted
            require(barred or not isinstance(refusal, NodeIsEvicted), "only who was evicted is barred")
            require(self.server.state.revision == revision, "a refused command changes nothing")
            return None
        except Exception as error:
            raise Violation(f"{command} breaks the core: {error!r}") from error
        require(not stale, "a stale lease is refused")
        if isinstance(command, commands.Leave) and not happened:
            del self.lingering[command.node_id]
        self._take_note(happened)
        return happened

    def _check_streams(self, fact: facts.Fact) -> None:
        """Check that no decision ignores a broken stream of a participant whose loss would change it."""
        match fact:
            case facts.NodeJoined(node_id=node_id):
                self.broken.discard(node_id)
            case (
                facts.NodeLost()
                | facts.NodeLeft()
                | facts.NodeDeparting()
                | facts.NodeEvicted()
                | facts.NodeSucceeded()
            ):
                self.at_work.discard(fact.node_id)
            case facts.RoundFrozen():
                self.at_work = {seat.node_id for seat in fact.seats}
                missing = self.at_work & self.broken
                require(not missing, "no round freezes over a node that is known to be disconnected")
            case facts.RoundEnded() if fact.end.cause is RoundEndCause.WORKER_FAILED:
                missing = self.at_work & self.broken
                require(not missing, "no restart is counted while the stream of a participant is broken")

    def settle(self) -> None:
        self.due = False
        self._take_note(core.settle(self.server.state, self.now))
        deadline = core.next_deadline(self.server.state)
        require(deadline is None or deadline > self.now, "whoever sleeps until the next deadline sleeps")
        if not self.server.uncommitted:
            self.ledger.check_wait(self.now)

    def commit(self) -> None:
        """Commit the facts, then publish them, as the engine does."""
        server, happened = self.server, [fact for fact, _ in self.server.uncommitted]
        for fact, decided_at in server.uncommitted:
            self.journal.append(
                encode_record(RUN, len(self.journal) + 1, fact, decided_at + TO_WALL, SERVICE)
            )
            durable = DecodedRecord(self.journal[-1])
            self.ledger.record(durable.revision, durable.fact(), decided_at)
        server.uncommitted = []
        if server.reopening is not None:
            self.checkpoint, server.reopening = server.reopening, None
        if happened and self.random.random() < 0.1:
            self.checkpoint = encode_snapshot(take_snapshot(server.state, TO_WALL))
        for fact in happened:
            if isinstance(fact, (facts.NodeLost, facts.NodeLeft, facts.NodeEvicted)):
                self._end_stale_stream(fact.node_id)
        reopened = any(isinstance(fact, facts.RunCreated) for fact in happened)
        if server.state.phase is Phase.CLOSED or reopened:
            self._end_streams_of_gone()
        begins_to_settle = server.state.settling and not server.settling
        server.settling = server.state.settling
        if begins_to_settle or any(isinstance(fact, TOLD_TO_NODES) for fact in happened):
            for agent in list(server.members.values()):
                self._tell(agent)
        if happened:
            for watcher in server.watchers:
                self._update_watcher(watcher)
        answers, server.answers = server.answers, []
        for answer in answers:
            answer()
        self._check_updates_are_complete()

    def _end_streams_of_gone(self) -> None:
        """End the streams of nodes that have left the closed run, or are not in its next incarnation."""
        for agent in list(self.server.members.values()):
            if not self._holds(agent):
                del self.server.members[agent.node_id]
                if self.agents.get(agent.node_id) is agent:
                    del self.agents[agent.node_id]  # it knows, or is refused when it comes back

    def _end_stale_stream(self, node_id: str) -> None:
        member = self.server.members.get(node_id)
        if member is None or member.lease == self.ledger.leases.get(node_id):
            return
        del self.server.members[node_id]
        self._forget_lease(member)

    def _forget_lease(self, agent: Agent) -> None:
        if agent.lease is not None:
            self.stale.append((agent.node_id, agent.lease))
        agent.lose_lease()

    def _tell(self, agent: Agent) -> None:
        assert agent.lease is not None
        update = node_update(self.server.state, agent.node_id)
        self.ledger.check_told(update)
        self.ledger.check_assignment(agent.node_id, agent.lease, update)
        agent.put(update)
        if update.phase == pb.PHASE_CLOSED and not agent.stays:
            self.server.members.pop(agent.node_id, None)

    def _update_watcher(self, watcher: Watcher) -> None:
        message = run_message(self.server.state)
        self.ledger.check_told(message)
        watcher.inbox = message

    def _check_updates_are_complete(self) -> None:
        """Check that each connected client has got, or is about to read, everything that it must act on now."""
        state = self.server.state
        for agent in self.server.members.values():
            latest = agent.inbox or agent.view
            if latest is None:
                require(state.phase is Phase.JOINABLE, "a node is told every phase but the one it came in")
                continue
            if agent.node_id in state.departing:
                continue  # it has given up its assignment itself
            now = node_update(state, agent.node_id)
            require(self._matters(latest) == self._matters(now), "nobody misses a phase that still matters")
        for watcher in self.server.watchers:
            latest_run = watcher.inbox or watcher.view
            require(
                latest_run is not None and latest_run.revision == state.revision, "watchers see every change"
            )

    @staticmethod
    def _matters(update: pb.NodeUpdate) -> bytes:
        kept = pb.NodeUpdate()
        kept.CopyFrom(update)
        kept.revision, kept.start_recorded = 0, False
        if kept.phase == pb.PHASE_FROZEN:
            kept.assignment.master_port = 0  # known, and sent, when the round is FINAL
        if kept.last_round_end.cause == pb.ROUND_END_CAUSE_WORKER_FAILED:
            # For people; the first failure may become known only later.
            kept.last_round_end.node_id = kept.last_round_end.detail = ""
        return kept.SerializeToString(deterministic=True)

    def crash(self) -> None:
        """Kill the server and start it again: uncommitted facts are gone, and no client ever got them."""
        durable = None if self.server.uncommitted else self._durable_view()
        # Nodes of a closed run; a lease may be over although its agent does not know it yet.
        known = set() if self.server.uncommitted else set(self.server.state.lingering)
        for agent in self.agents.values():
            agent.connected = agent.asked = False
        for watcher in self.watchers:
            watcher.connected = False
        self.server = Server(self.recover())
        self.ledger.server_started(self.now)
        self.evicted = set(self.server.state.evicted)
        state = self.server.state
        self.held = {node.node_id: node.lease for node in state.nodes.values()}
        self.broken = set(self.held)
        left = {
            agent.node_id
            for agent in self.agents.values()
            if agent.lease == self.lingering.get(agent.node_id)
        }
        self.lingering = {node.node_id: node.lease for node in state.lingering.values()}
        require(left & known <= self.lingering.keys(), "a restart forgets no node that may still be there")
        self.at_work = state.seats.keys() - state.succeeded - state.departing.keys()
        require(self.held == self.ledger.leases, "the leases after a restart are those of the journal")
        require(durable is None or durable == self._durable_view(), "a run is the fold of its facts")
        self.settle()

    def recover(self) -> RunState:
        """Return the state that the journal holds, as the engine restores it: from the last checkpoint on."""
        folded = self._folded(self._restored(self.tombstone))
        state = self._folded(self._restored(self.checkpoint or self.tombstone))
        require(
            replace(take_snapshot(state, TO_WALL), lingering=())
            == replace(take_snapshot(folded, TO_WALL), lingering=()),
            "a checkpoint is the fold of what came before it",
        )
        leases.restart_leases(state, self.now)
        return state

    def _restored(self, content: bytes | None) -> RunState:
        if content is None:
            return RunState(RUN)
        return restore(decode_snapshot(content), self.now, TO_WALL)

    def _folded(self, state: RunState) -> RunState:
        for blob in self.journal[state.revision :]:
            record = DecodedRecord(blob)
            apply(state, record.fact(), self.now, to_seconds(record.time) - TO_WALL)
        return state

    def _durable_view(self) -> pb.Run:
        view = run_message(self.server.state)
        for node in view.nodes:
            node.connected = False
        return view

    def expire(self) -> None:
        """Forget a run without nodes, as the engine does when it has been idle for long enough."""
        self.tombstone = encode_snapshot(take_tombstone(self.server.state))
        self.checkpoint = None
        self.ledger.forget()
        self.evicted.clear()
        self.lingering.clear()
        for agent in self.server.members.values():  # of a closed run
            self.agents.pop(agent.node_id, None)
        self.server.members.clear()
        for watcher in self.server.watchers:
            watcher.connected, watcher.inbox = False, None
        self.server.watchers.clear()
        self.server.state = self._restored(self.tombstone)

    # ---- nodes and watchers

    def _pick(self, having: Callable[[Agent], bool]) -> Agent | None:
        candidates = [agent for agent in self.agents.values() if having(agent)]
        return self.random.choice(candidates) if candidates else None

    def _new_agent(self, node_id: str) -> Agent:
        """Start an agent in the place of one of that name; the server may not notice the end of the old one."""
        self._kill(node_id, silently=self.random.random() < 0.5)
        agent = Agent(node_id, self.random.choice([1, 2, 4]), self.random.choice(["trainer", "evaluator"]))
        agent.stays = self.random.random() < 0.7
        self.agents[node_id] = agent
        return agent

    def _kill(self, node_id: str, *, silently: bool) -> None:
        agent = self.agents.pop(node_id, None)
        if agent is None:
            return
        if not silently:
            self._break_stream(agent)
        if agent.lease is not None:
            self.stale.append((node_id, agent.lease))

    def _join(self, agent: Agent) -> None:
        command = commands.Join(
            agent.node_id,
            self.settings,
            f"{agent.node_id}.cluster",
            agent.local_world_size,
            agent.role,
            f"rack{len(agent.node_id)}",
            incarnation=f"life {self.random.random()}",
            former_incarnation=agent.incarnation,
        )
        state = self.server.state
        reopening = encode_snapshot(take_reopened(state)) if state.phase is Phase.CLOSED else None
        happened = self.execute(command)
        if happened is not None:
            self.server.reopening = reopening or self.server.reopening
            ended = [each.incarnation for each in state.ended_incarnations]
            require(agent.incarnation not in ended, "who was in an incarnation that ended is in no later one")
        if happened is None:
            require(
                self.server.state.phase is Phase.CLOSED
                or agent.node_id in self.evicted
                or agent.incarnation in [each.incarnation for each in state.ended_incarnations],
                "only a closed run refuses who brings its settings and was not evicted",
            )
            self.agents.pop(agent.node_id, None)
            return
        (lease,) = (fact.lease for fact in happened if isinstance(fact, facts.NodeJoined))
        agent.asked, agent.seen_at = True, self.now
        incarnation, server = state.incarnation, self.server

        def admit() -> None:
            agent.asked = False
            if self.agents.get(agent.node_id) is not agent:
                self.stale.append((agent.node_id, lease))
                return
            if server.state.nodes.get(agent.node_id) is None or self.ledger.leases[agent.node_id] != lease:
                return
            agent.lease, agent.connected, agent.incarnation = lease, True, incarnation
            agent.revision = self.ledger.revision
            server.members[agent.node_id] = agent
            if server.state.phase is not Phase.JOINABLE:
                self._tell(agent)

        server.answers.append(admit)

    def _resume(self, agent: Agent) -> None:
        server = self.server
        agent.asked = True

        def admit() -> None:
            agent.asked = False
            if self.agents.get(agent.node_id) is not agent or agent.lease is None:
                return
            try:
                check_lease(server.state, agent.node_id, agent.lease)
            except (LeaseLost, NodeIsEvicted):
                require(
                    self.ledger.leases.get(agent.node_id) != agent.lease, "a lease that stands is honoured"
                )
                self._forget_lease(agent)
                return
            except RunIsClosed:
                holder = server.state.lingering.get(agent.node_id)
                if not agent.stays or holder is None or holder.lease != agent.lease:
                    del self.agents[agent.node_id]
                    return
            check_revision(server.state, agent.revision)
            self.broken.discard(agent.node_id)
            agent.seen_at = self.now
            self.due |= leases.renew(server.state, agent.node_id, self.now)
            server.members[agent.node_id] = agent
            agent.connected = True
            self._tell(agent)

        server.answers.append(admit)

    def _break_stream(self, agent: Agent) -> None:
        if self.server.members.get(agent.node_id) is agent:
            del self.server.members[agent.node_id]
            if self._holds(agent):
                leases.disconnect(self.server.state, agent.node_id, self.now)
                self.broken.add(agent.node_id)
        agent.connected = False

    def _renew(self, agent: Agent) -> None:
        if self.server.members.get(agent.node_id) is agent and self._holds(agent):
            agent.seen_at = self.now
            self.due |= leases.renew(self.server.state, agent.node_id, self.now)

    def _holds(self, agent: Agent) -> bool:
        """Return True if the server keeps a lease of it, also past the end of the run."""
        node = self.server.state.holders.get(agent.node_id)
        return node is not None and node.lease == agent.lease

    def _confirm(self, agent: Agent, round_: int) -> None:
        assert agent.lease is not None
        require(agent.workers_of is None, "who confirms has no workers")
        self.execute(commands.Confirm(agent.node_id, agent.lease, round_, 29500))

    def _failure(self, agent: Agent, round_: int) -> ReportedFailure:
        rank = agent.view.assignment.base_rank if agent.view is not None else 0
        return ReportedFailure(
            round_,
            rank,
            0,
            agent.role,
            agent.node_id,
            "host",
            4711,
            1,
            1.7e9,
            "it broke",
            "Traceback",
            "/log",
            age=self.random.choice([0.0, 0.0, 0.5, 3.0, 1e3, 1e6]),
            permanent=self.random.random() < 0.03,
        )

    def let_time_pass(self, seconds: float, silent: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """Let time pass; heartbeats arrive from all agents but the silent."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.settings.keep_alive_interval)
            for agent in self.agents.values():
                if agent.node_id not in silent:
                    self._renew(agent)
            self.settle()

    # ---- steps

    def step(self) -> None:
        """Let one thing happen."""
        if self.due:
            self.settle()
        name = self.random.choices(list(self.weights), list(self.weights.values()))[0]
        self.trace.append(f"{self.now:g} {name}")
        getattr(self, "_step_" + name)()

    STEPS: ClassVar[dict[str, float]] = {
        "commit": 25,
        "read": 25,
        "join": 8,
        "confirm": 30,
        "time": 8,
        "fail": 4,
        "start": 8,
        "succeed": 8,
        "leave": 2,
        "disconnect": 3,
        "resume": 8,
        "kill": 2,
        "stale_command": 6,
        "crash": 3,
        "restart": 0.3,
        "evict": 0.3,
        "readmit": 1,
        "expire": 3,
        "watch": 4,
        "close": 0.05,
    }
    # Hosts and network are healthy, and the workers are not.
    OF_BAD_WORKERS: ClassVar[dict[str, float]] = {
        "confirm": 60,
        "read": 60,
        "fail": 30,
        "succeed": 0.5,
        "leave": 0.3,
        "kill": 0.3,
        "disconnect": 0.5,
        "time": 5,
        "crash": 1,
    }

    def _step_commit(self) -> None:
        self.commit()

    def _step_read(self) -> None:
        for agent in list(self.agents.values()):
            if self.random.random() < 0.7:
                self._read(agent)
        for watcher in self.watchers:
            if self.random.random() < 0.5:
                watcher.read()

    def _read(self, agent: Agent) -> bool:
        """Let an agent read its update; return True if it leaves because the run is closed."""
        agent.read()
        closed = agent.view is not None and agent.view.phase == pb.PHASE_CLOSED
        if closed and agent.stays and self.random.random() < 0.5:
            return False  # its workers take their time
        if closed:
            del self.agents[agent.node_id]
            self.server.members.pop(agent.node_id, None)
            if agent.stays and agent.connected and agent.lease is not None and self._holds(agent):
                self.execute(commands.Leave(agent.node_id, agent.lease, "no worker is left"))
        return closed

    def _step_join(self) -> None:
        agent = self._pick(lambda agent: agent.lease is None and not agent.asked)
        if agent is None or self.random.random() < 0.5:
            agent = self._new_agent(self.random.choice(NAMES))
        self._join(agent)

    def _step_confirm(self) -> None:
        for agent in list(self.agents.values()):
            update = agent.view if agent.connected else None
            if update is None or update.phase != pb.PHASE_FROZEN or not update.HasField("assignment"):
                continue
            if self.random.random() < 0.8:
                self._confirm(agent, update.assignment.round)

    def _step_time(self) -> None:
        silent = {node_id for node_id in self.agents if self.random.random() < 0.15}
        self.let_time_pass(self.random.choice([0.5, 3.0, 3.0, 3.0, 12.0, 25.0, 70.0]), silent)

    def _step_fail(self) -> None:
        agent = self._pick(lambda agent: agent.connected and agent.workers_of is not None)
        if agent is not None and agent.lease is not None and agent.workers_of is not None:
            failure = self._failure(agent, agent.workers_of)
            self.execute(commands.ReportFailure(agent.node_id, agent.lease, failure))
            if self.random.random() < 0.5:
                self._fail_too(failure.round)
            if self.random.random() < 0.5:
                self.let_time_pass(0.5)

    def _fail_too(self, round_: int) -> None:
        """Let other nodes fail of it, some with a report after the end of the round."""
        for agent in list(self.agents.values()):
            if agent.connected and agent.lease is not None and self.random.random() < 0.5:
                failure = replace(self._failure(agent, round_), local_rank=self.random.choice([0, 0, 1]))
                self.execute(commands.ReportFailure(agent.node_id, agent.lease, failure))

    def _step_start(self) -> None:
        """Let agents report that their workers run; some reports are repeated, or of an ended round."""
        for agent in list(self.agents.values()):
            if agent.connected and agent.workers_of is not None and self.random.random() < 0.6:
                parts = RecoveryParts(*(self.random.choice([0.0, 0.5, 4.0, 1e6]) for _ in range(5)))
                age = self.random.choice([0.0, 0.5, 3.0, 1e6])
                self._report_start(agent, StartReport(agent.workers_of, parts, age))

    def _report_start(self, agent: Agent, report: StartReport) -> None:
        if self.server.members.get(agent.node_id) is agent and self._holds(agent):
            self.due |= starts.note(self.server.state, agent.node_id, report, self.now)

    def _step_succeed(self) -> None:
        agent = self._pick(lambda agent: agent.connected and agent.workers_of is not None)
        if agent is not None and agent.lease is not None and agent.workers_of is not None:
            self.execute(commands.ReportSuccess(agent.node_id, agent.lease, agent.workers_of))

    def _step_leave(self) -> None:
        agent = self._pick(lambda agent: agent.connected)
        if agent is None or agent.lease is None:
            return
        if self.random.random() < 0.6:
            self.execute(commands.Depart(agent.node_id, agent.lease, "told to stop"))
        else:
            agent.workers_of = None
            self.execute(commands.Leave(agent.node_id, agent.lease, "told to stop"))

    def _step_disconnect(self) -> None:
        agent = self._pick(lambda agent: agent.connected)
        if agent is not None:
            self._break_stream(agent)

    def _step_resume(self) -> None:
        for agent in list(self.agents.values()):
            if agent.lease is not None and not agent.connected and not agent.asked:
                self._resume(agent)

    def _step_kill(self) -> None:
        agent = self._pick(lambda agent: True)
        if agent is not None:
            self._kill(agent.node_id, silently=self.random.random() < 0.5)

    def _step_stale_command(self) -> None:
        """Send a command of an old lease, or one that arrives late."""
        node_id, lease = self.random.choice(self.stale) if self.stale else ("nobody", 1)
        agent = self._pick(lambda agent: agent.connected)
        if agent is not None and agent.lease is not None and self.random.random() < 0.5:
            node_id, lease = agent.node_id, agent.lease  # a valid lease, but another round
        round_ = max(0, self.server.state.round + self.random.choice([-2, -1, 1, 5]))
        if lease != self.held.get(node_id):
            round_ = self.server.state.round
        failure = self._failure(Agent(node_id, 1, "trainer"), round_)
        stale: list[commands.Command] = [
            commands.Confirm(node_id, lease, round_, 1),
            commands.ReportFailure(node_id, lease, failure),
            commands.ReportSuccess(node_id, lease, round_),
        ]
        if lease != self.held.get(node_id):
            stale += [commands.Leave(node_id, lease, "late"), commands.Depart(node_id, lease, "late")]
        command = self.random.choice(stale)
        happened = self.execute(command) or []
        if isinstance(command, commands.ReportFailure):
            # It may have been the first failure of the round that has just ended: the `Ledger` checks that.
            happened = [fact for fact in happened if not isinstance(fact, facts.WorkerFailed)]
            unmendable = failure.permanent and not any(
                isinstance(fact, facts.RoundEnded) for fact in happened
            )
            happened = [] if unmendable else happened
        require(not happened, "what is said of another round changes nothing")

    def _step_crash(self) -> None:
        self.crash()

    def _step_watch(self) -> None:
        watcher = self.random.choice(self.watchers)
        if watcher.connected:
            self.server.watchers.remove(watcher)
            watcher.connected, watcher.inbox = False, None
            return
        server = self.server

        def subscribe() -> None:
            if watcher.connected or not server.state.created:
                return  # it subscribed twice, or the run does not exist
            check_revision(server.state, watcher.revision)
            watcher.connected, watcher.inbox = True, None
            server.watchers.append(watcher)
            if server.state.revision > watcher.revision:
                self._update_watcher(watcher)

        server.answers.append(subscribe)

    def _step_restart(self) -> None:
        self._operate(commands.Restart("try again"))

    def _step_evict(self) -> None:
        self._operate(commands.Evict(self.random.choice(NAMES), "bad host"))

    def _step_readmit(self) -> None:
        self._operate(commands.Readmit(self.random.choice(NAMES), "mended"))

    def _operate(self, command: commands.Command) -> None:
        """Carry out an operator's command, if the run exists."""
        if self.server.state.created:
            self.execute(command)

    def _step_close(self) -> None:
        self._operate(commands.Close("enough"))

    def _step_expire(self) -> None:
        server = self.server
        if server.state.phase is Phase.CLOSED and self.random.random() < 0.8:
            return  # it may be reopened before
        idle = server.state.idle_since
        require((idle is None) == bool(self.held or not server.state.created), "a run is idle without nodes")
        if idle is not None and not server.uncommitted:
            self.expire()

    # ---- the end of all faults

    def reach_agreement(self) -> None:
        """Let enough well-behaved nodes answer for as long as it may take, until they agree on a round.

        Raises:
            Violation: They don't agree.
        """
        self.trace.append("---- no more faults")
        for name in sorted(self.evicted):
            self.execute(commands.Readmit(name, "no more faults"))
        settings = self.settings
        grace = settings.join_timeout + settings.last_call_timeout + 2 * settings.confirm_timeout
        deadline = self.now + 2 * (grace + settings.time_to_live)
        while self.ledger.closed is None and not self._agreed():
            require(self.now < deadline, "enough nodes that answer agree on a round")
            for agent in list(self.agents.values()):
                self._behave(agent)
            for name in NAMES:
                if len(self.agents) < settings.min_nodes and name not in self.agents:
                    self._new_agent(name)
            self.commit()
            self.let_time_pass(1.0)
            self.commit()

    def _behave(self, agent: Agent) -> None:
        if self._read(agent):
            return
        if agent.lease is None and not agent.asked:
            self._join(agent)
        elif not agent.connected and not agent.asked:
            self._resume(agent)
        elif (
            agent.view is not None
            and agent.view.phase == pb.PHASE_FROZEN
            and agent.view.HasField("assignment")
        ):
            self._confirm(agent, agent.view.assignment.round)

    def _agreed(self) -> bool:
        """Return True if the round is FINAL, and all its participants run its workers."""
        state = self.server.state
        if state.phase is not Phase.FINAL:
            return False
        for agent in self.agents.values():
            agent.read()
        return all(
            node_id in self.agents and self.agents[node_id].workers_of == state.round
            for node_id in state.seats
        )


def play(seed: int, steps: int = 200) -> History:
    """Play the history of a seed to its end.

    Raises:
        Violation: An invariant is broken; the message has the seed and the last steps.
    """
    history = History(seed)
    try:
        for _ in range(steps):
            history.step()
        history.reach_agreement()
    except Violation as violation:
        happened = "\n".join(history.trace[-60:])
        raise Violation(f"history {seed}: {violation}\n{history.settings}\n{happened}") from violation
    return history
