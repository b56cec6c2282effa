"""A node whose agent joins, leaves, dies and comes back, and which records all updates it receives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rallypoint.rendezvous.base.entries import Writer
from rallypoint.rendezvous.client import Admitted, Event, Membership, MembershipReset
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.endpoint import ClientSecurity, Plaintext
from rallypoint.rpc.replica_client import ReplicaClient

RUN = "run-1"
PLAINTEXT = Plaintext()
WORKERS = 2
"""Workers of every node."""


class Told(NamedTuple):
    """An update that a node received, and its lease then."""

    lease: int
    update: pb.NodeUpdate


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a node's workers in a FINAL round, under a lease."""

    round: int
    lease: int
    token: bytes


class TormentedNode:
    """One node over all its agents; each agent has a connection of its own.

    Attributes:
        name: Its node_id, the same for all its agents.
        run_id: The run that they join.
        `told`: All updates that its agents received, in order.
        admissions: The leases that they were granted.
        departures: The leases that they gave back, confirmed by the service.
        losses: The reported reasons of leases that ended without their request.
        resumptions: The number of leases resumed on a new stream.
        place: The place in which it runs; None: it does not run.
    """

    def __init__(
        self,
        name: str,
        endpoint: str,
        settings: pb.RunSettings,
        draw: random.Random,
        on_change: Callable[[], None] = lambda: None,
        *,
        run_id: str = RUN,
        security: ClientSecurity = PLAINTEXT,
    ) -> None:
        """Join nothing yet; `on_change` is called for each event that it receives."""
        self.name = name
        self.run_id = run_id
        self.told: list[Told] = []
        self.admissions: list[int] = []
        self.departures: list[int] = []
        self.losses: list[str] = []
        self.resumptions = 0
        self.place: Place | None = None
        self._endpoint = endpoint
        self._security = security
        self._settings = settings
        self._draw = draw
        self._on_change = on_change
        self._membership: Membership | None = None
        self._life: asyncio.Task[None] | None = None
        self._leaving = False

    @property
    def lease(self) -> int:
        """The lease that its agent holds, as far as the agent knows; 0: none."""
        return self._membership.lease if self._membership is not None else 0

    @property
    def is_in(self) -> bool:
        """True if it has an agent."""
        return self._life is not None

    @property
    def writer(self) -> Writer:
        """The lease that its agent holds, to write with.

        Raises:
            AssertionError: It holds none.
        """
        held = self._membership.held if self._membership is not None else None
        assert held is not None, f"{self.name} holds no lease"
        return Writer(self.name, held.number, held.token)

    def join(self) -> None:
        """Start an agent."""
        assert self._life is None, "one agent at a time"
        self._leaving = False
        self._life = asyncio.create_task(self._live(), name=self.name)

    async def leave(self) -> None:
        """Let the agent give its lease back; return when it has left."""
        assert self._membership is not None
        assert self._life is not None
        lease, losses = self.lease, len(self.losses)
        self.place = None
        self._leaving = True  # a confirmation of a round would withdraw it
        self._membership.leave("its time has come")
        await self._life
        self._life = self._membership = None
        if lease and len(self.losses) == losses:
            self.departures.append(lease)

    async def die(self) -> None:
        """End the agent and its connection without notice."""
        assert self._life is not None
        self._life.cancel()
        await asyncio.wait({self._life})
        self._life = self._membership = self.place = None

    def break_worker(self) -> None:
        """Let the agent report that a worker failed, if one runs."""
        if self._membership is not None and self.place is not None:
            self._membership.report_failure(
                pb.WorkerFailure(round=self.place.round, rank=0, exit_code=1, message="it was told to")
            )

    def heartbeat(self, trouble: str) -> None:
        """Send a heartbeat at once; GetRun shows `trouble` as soon as it has taken effect."""
        assert self._membership is not None
        self._membership.report_watchdog(trouble)

    def check_alive(self) -> None:
        """Raise the error that ended the agent, if it has ended."""
        if self._life is not None and self._life.done():
            self._life.result()
            raise AssertionError(f"{self.name} went without being told to")

    async def _live(self) -> None:
        board = ReplicaClient(self._endpoint, self._security)
        join = pb.JoinRun(
            run_id=self.run_id,
            node_id=self.name,
            settings=self._settings,
            address=f"{self.name}.cluster.internal",
            local_world_size=WORKERS,
            role="trainer",
        )
        # A seed of its own: the draws of one agent must not depend on the times of the others' draws.
        jitter = random.Random(self._draw.random())
        self._membership = Membership(
            board, self._endpoint, join, self._on_event, connect_timeout=600.0, jitter=jitter
        )
        try:
            await self._membership.run()
        finally:
            await board.close()

    def _on_event(self, event: Event) -> None:
        assert self._membership is not None
        if isinstance(event, MembershipReset):
            self.losses.append(event.reason)
            self.place = None
        elif isinstance(event, Admitted):
            if event.resumed:
                self.resumptions += 1
            else:
                self.admissions.append(event.lease)
        else:
            update = event.update
            self.told.append(Told(self._membership.lease, update))
            assigned = update.HasField("assignment") and not self._leaving
            runs = assigned and update.phase == pb.PHASE_FINAL
            held = self._membership.held
            self.place = Place(update.assignment.round, held.number, held.token) if runs and held else None
            if assigned and update.phase == pb.PHASE_FROZEN:
                self._membership.confirm(update.assignment.round, master_port=29_500)
        self._on_change()
