"""One process of an agent: the product's core and its membership, with simulated workers.

It connects the two as `rallypoint.agent.job.job.Job` does, without processes, logs and sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rallypoint.agent.core import core
from rallypoint.agent.job.result import assignment_value, phase_value
from rallypoint.rendezvous.client import Admitted, Event, Membership, MembershipReset, RendezvousUnreachable
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import ServiceError
from simulation.clockwork import Clockwork, Process
from simulation.losses import RESET, TIMEOUT, Loss
from simulation.network import Link, Network
from simulation.referee import Group, Referee
from simulation.workers import Fates, WorkerGroup

# Seconds for which a node that leaves waits for the service to end its lease.
_CLOSE_TIMEOUT = 5.0
_CONNECT_TIMEOUT = 60.0
# Latency of a link, in seconds, up to which the end of a connection is noticed at once.
_PROMPT = 0.02


@dataclass(slots=True)
class Environment:
    """The environment of an agent."""

    clockwork: Clockwork
    network: Network
    referee: Referee
    chance: random.Random
    fates: Fates
    # The round of a run whose workers may write to the service's store; None: there is no service.
    writable_round: Callable[[str], int | None]
    # Returns the client object for the service, of a process on a host with a link.
    connect: Callable[[Process, Link], Any]
    # Returns all links to the service, of a process on a host with a link.
    links: Callable[[Process, Link], list[Link]]


class Node:
    """An agent and its host's workers, from the join to the end."""

    def __init__(
        self, around: Environment, process: Process, link: Link, request: pb.JoinRun, jitter: random.Random
    ) -> None:
        self.process = process
        self.link = link
        self.request = request
        self.state = core.AgentState()
        self.crew: WorkerGroup | None = None
        self.result: str | None = None
        self.revision = 0
        self._around = around
        self._events: asyncio.Queue[core.Event] = asyncio.Queue()
        self._lease = 0
        self.membership = Membership(
            around.connect(process, link),
            "rendezvous:29400",
            request,
            self._on_membership_event,
            connect_timeout=_CONNECT_TIMEOUT,
            jitter=jitter,
        )
        self._membership_task = process.create_task(self._be_member())
        process.create_task(self._run())

    @property
    def run_id(self) -> str:
        """The id of its run."""
        return self.request.run_id

    @property
    def node_id(self) -> str:
        """The id of the node."""
        return self.request.node_id

    @property
    def live(self) -> bool:
        """True if the node is in the run and is not leaving."""
        return self.process.alive and self.state.leaving is None and not (self.state.left or self.state.out)

    @property
    def _links(self) -> list[Link]:
        return self._around.links(self.process, self.link)

    @property
    def whole(self) -> bool:
        """True if no link of its host to the service is cut."""
        return all(link.whole for link in self._links)

    @property
    def runs(self) -> int:
        """The round whose workers run here, or have succeeded here; 0: none."""
        state = self.state
        if state.workers is not core.Workers.RUNNING:
            return state.succeeded
        return state.started if self.crew is not None and self.crew.running else 0

    def request_stop(self) -> None:
        """Request a graceful leave."""
        self.process.call_soon(self._events.put_nowait, core.StopRequested("told to stop"))

    async def _run(self) -> None:
        while not self.state.finished:
            event = await self._events.get()
            self.state, effects = core.decide(self.state, event)
            for effect in effects:
                self._carry_out(effect)
        self._membership_task.cancel()
        if self.crew is not None:
            self.crew.vanish()
        self.result = self.result or "finished"
        self._around.referee.note("exit", self.process.name, self.result)
        self._around.network.died(self.process, silently=False)
        self.process.kill()

    def _carry_out(self, effect: core.Effect) -> None:
        match effect:
            case core.StartWorkers():
                self._start(effect.assignment)
            case core.StopWorkers():
                assert self.crew is not None, "workers that run are a crew's"
                self.crew.stop(lambda: self._put_event(core.GroupStopped()))
            case core.SendConfirm():
                self._around.referee.confirms(self, effect.round)
                self.membership.confirm(effect.round, 29500)
            case core.SendFailure():
                self.membership.report_failure(self._failure(effect.round))
            case core.SendSuccess():
                self.membership.report_success(effect.round)
            case core.SendDeparture():
                self.membership.depart(effect.detail)
            case core.SendLeave():
                self._leave(effect.detail)
            case core.Finish():
                pass  # the loop in `_run` sees the state

    def _put_event(self, event: core.Event) -> None:
        self.process.call_soon(self._events.put_nowait, event)

    def _group(self, round_: int, fencing_token: int) -> Group:
        token = self.membership.held.token if self.membership.held is not None else b""
        return Group(self.run_id, self.node_id, self._lease, round_, fencing_token, self, token)

    def _start(self, seat: core.Assignment) -> None:
        around = self._around
        group = self._group(seat.round, seat.fencing_token)
        self.crew = WorkerGroup(
            around.clockwork,
            around.chance,
            around.fates,
            around.referee,
            group,
            losses=around.referee.losses,
            asleep=self.asleep,
            on_start=lambda: self._report_start(seat.round),
            on_write=lambda: around.referee.writes(group, around.writable_round(group.run_id)),
            on_failure=lambda: self._put_event(core.GroupFailed()),
            on_success=lambda: self._put_event(core.GroupSucceeded()),
        )

    def _report_start(self, round_: int) -> None:
        parts = pb.RecoveryParts()
        parts.started.FromMilliseconds(len(self.node_id))
        start = pb.ReportStart(round=round_, parts=parts)
        self.process.call_soon(self.membership.report_start, start)

    def _failure(self, round_: int) -> pb.WorkerFailure:
        """Return the report of a failure, by a host whose wall clock may be wrong."""
        around = self._around
        seconds = around.clockwork.now - self.crew.failed_at if self.crew is not None else 0.0
        failure = pb.WorkerFailure(
            round=round_,
            local_rank=around.chance.randrange(self.request.local_world_size),
            host="host",
            pid=4711,
            exit_code=1,
            message="it broke",
            permanent=around.chance.random() < around.fates.unmendable and self._failed_by_itself,
        )
        # The wall clock may be wrong by hours.
        failure.time.FromSeconds(round(1.7e9 + around.chance.uniform(-5e4, 5e4)))
        # If the referee distinguishes failures from those caused by a lost host, the ages are right.
        ages = [seconds] if around.fates.bereaved else [seconds, seconds, -1e5, 1e5]
        failure.age.FromNanoseconds(round(around.chance.choice(ages) * 1e9))
        return failure

    @property
    def _failed_by_itself(self) -> bool:
        return self.crew is None or self.crew.own_failure

    def _leave(self, detail: str) -> None:
        if self.membership.lease:
            self.membership.leave(detail)
            self.process.create_task(self._bound_leaving())
        else:
            self._membership_task.cancel()

    async def _bound_leaving(self) -> None:
        done, _ = await asyncio.wait({self._membership_task}, timeout=_CLOSE_TIMEOUT)
        if not done:
            self._membership_task.cancel()

    async def _be_member(self) -> None:
        try:
            await self.membership.run()
        except RendezvousUnreachable:
            self.result = "unreachable"
            self._around.referee.unreachable(self.node_id, admitted=self._lease > 0)
        except ServiceError as error:
            self.result = error.reason
            self._around.referee.refused(self.run_id, self.node_id, self._lease, error)
        finally:
            self._events.put_nowait(core.MembershipEnded(self.result or ""))

    def _on_membership_event(self, event: Event) -> None:
        match event:
            case Admitted():
                self._around.referee.note("admitted", self.process.name, event)
                self._lease = event.lease
                if not event.resumed:
                    self.revision = 0
            case MembershipReset():
                self._around.referee.note("lease ended", self.process.name, event.reason)
                self._events.put_nowait(core.LeaseEnded(event.reason))
            case _:
                self._on_update(event.update)

    def _on_update(self, update: pb.NodeUpdate) -> None:
        self._around.referee.saw(self.run_id, self.node_id, self.revision, update)
        self.revision = update.revision
        self._events.put_nowait(
            core.RunUpdated(
                phase=phase_value(update.phase),
                assignment=assignment_value(update.assignment) if update.HasField("assignment") else None,
                restart_count=update.restart_count,
                detail=update.last_round_end.detail,
                exit_barrier_passed=update.exit_barrier_passed,
            )
        )

    # ---- ways to die

    def crash(self) -> None:
        """Kill the agent; its spawner kills the workers, and the kernel closes its connections."""
        around, ran = self._around, self.crew is not None and self.crew.running
        self.process.kill()
        around.network.died(self.process, silently=False)
        delay = around.chance.choice([0.0, around.chance.uniform(0.0, 0.2)])
        if self.crew is not None:
            around.clockwork.after(delay, self.crew.vanish)
        self._lost(silent=False, after=delay + around.chance.uniform(*(RESET if ran else TIMEOUT)))

    def lose_power(self) -> None:
        """The host loses power, with all its processes."""
        self.process.kill()
        self._around.network.died(self.process, silently=True)
        if self.crew is not None:
            self.crew.vanish()
        self._lost(after=self._around.chance.uniform(*TIMEOUT))

    def cut_off(self, seconds: float) -> None:
        """The host reaches neither the service nor its peers for a while, and no connection is closed."""
        around, links = self._around, self._links
        for link in links:
            around.network.block(link, up=True, down=True)
        epochs = [link.epoch for link in links]
        self._lost(
            after=around.chance.uniform(*TIMEOUT), still=lambda: [link.epoch for link in links] == epochs
        )

        def back() -> None:
            for link, epoch in zip(links, epochs, strict=True):
                if link.epoch == epoch:
                    around.network.heal(link)

        around.clockwork.after(seconds, back)

    def asleep(self) -> bool:
        """Return True if its host is suspended, with its workers."""
        return self.process.suspended

    def fall_asleep(self) -> None:
        """Note that its host is suspended: its peers time out."""
        process, since = self.process, self.process.paused_since
        self._lost(
            after=self._around.chance.uniform(*TIMEOUT),
            still=lambda: process.suspended and process.paused_since == since,
        )

    def _lost(self, *, after: float, silent: bool = True, still: Callable[[], bool] = lambda: True) -> None:
        """Make the workers of its round fail after a time, on this host as well, if the host is `still` gone.

        `silent`: none of its connections is closed.
        """
        around, state = self._around, self.state
        seat = state.assignment
        if seat is None or state.confirmed != seat.round or state.succeeded == seat.round:
            return
        losses, round_ = around.referee.losses, seat.round
        if silent or (self.whole and all(link.latency <= _PROMPT for link in self._links)):
            # Otherwise the service may learn of its end long after its peers' failures, and can't know which was first.
            loss = Loss(self.node_id, self._lease, around.clockwork.now, still)
            losses.host_lost(self.run_id, round_, loss)
        group = self._group(round_, seat.fencing_token)

        def fail() -> None:
            if not still():
                return
            peers = losses.peers(group)
            for crew in [*peers, *([self.crew] if peers and self.crew is not None else [])]:
                crew.lose_peer(around.chance.uniform(0.0, 0.05))

        around.clockwork.after(after, fail)
