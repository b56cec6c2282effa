"""Clients that are no nodes: a watcher of the run's states, a reader of its events, and an operator."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.errors import decode
from rendezvous.core.ledger import require
from simulation.clockwork import Process
from simulation.network import Link, Network
from simulation.plan import RUN
from simulation.referee import Referee
from simulation.wire import Channel

# Seconds until a call is retried.
_PAUSE = 1.5


class Onlooker(ABC):
    """A process that follows the run over any number of streams."""

    def __init__(self, process: Process, link: Link, network: Network, referee: Referee) -> None:
        self.process = process
        self.link = link
        self.revision = 0
        self.referee = referee
        channel: Any = Channel(process, link, network)
        self.stub: Any = pb_grpc.RendezvousServiceStub(channel)
        process.create_task(self._look_on())

    async def _look_on(self) -> None:
        while True:
            try:
                await self.follow()
            except grpc.aio.AioRpcError as error:
                if decode(error).reason == "EVENTS_COMPACTED":
                    self.revision = 0  # compacted events are no longer available
            await asyncio.sleep(_PAUSE)

    @abstractmethod
    async def follow(self) -> None:
        """Follow one stream to its end."""


class Watcher(Onlooker):
    """A client that follows the run's states: some may be skipped, and none is sent twice."""

    async def follow(self) -> None:
        request = pb.WatchRunRequest(run_id=RUN, after_revision=self.revision)
        async for answer in self.stub.WatchRun(request, wait_for_ready=True):
            run = answer.run
            with self.referee.judging():
                require(
                    run.revision > self.revision, "revisions that a watcher sees grow, and none comes twice"
                )
            self.revision = run.revision


class Reader(Onlooker):
    """A client that follows the run's events: none is left out, unless the server returns EVENTS_COMPACTED."""

    async def follow(self) -> None:
        request = pb.WatchEventsRequest(run_id=RUN, after_revision=self.revision)
        async for answer in self.stub.WatchEvents(request, wait_for_ready=True):
            with self.referee.judging():
                for event in answer.events:
                    gap = self.revision and event.revision != self.revision + 1
                    require(not gap, "no event is left out, and none comes twice")
                    self.revision = event.revision
                durable = self.referee.ledger(RUN).revision
                require(self.revision <= durable, "nothing is told before it is durable")


class Operator:
    """An operator of the run; it retries each request until it gets a reply."""

    def __init__(self, process: Process, link: Link, network: Network, referee: Referee) -> None:
        self.process = process
        self.link = link
        self._referee = referee
        channel: Any = Channel(process, link, network)
        self._stub: Any = pb_grpc.RendezvousServiceStub(channel)

    def close_run(self) -> None:
        """Close the run."""
        self._referee.ledger(RUN).operator_closes = True
        request = pb.CloseRunRequest(run_id=RUN, reason="enough")
        self._ask(self._stub.CloseRun, request, lambda _: self._referee.closed_by_operator(RUN))

    def restart_run(self) -> None:
        """Restart all workers."""
        self._ask(self._stub.RestartRun, pb.RestartRunRequest(run_id=RUN, reason="again"), lambda _: None)

    def evict_node(self, node_id: str) -> None:
        """Evict a node."""
        request = pb.EvictNodeRequest(run_id=RUN, node_id=node_id, reason="broken")
        self._ask(self._stub.EvictNode, request, lambda _: None)

    def readmit_node(self, node_id: str) -> None:
        """Readmit a node."""
        request = pb.ReadmitNodeRequest(run_id=RUN, node_id=node_id, reason="mended")
        self._ask(self._stub.ReadmitNode, request, lambda _: None)

    def _ask(
        self, method: Callable[..., Awaitable[Any]], request: Any, answered: Callable[[Any], None]
    ) -> None:
        self.process.create_task(self._insist(method, request, answered))

    async def _insist(
        self, method: Callable[..., Awaitable[Any]], request: Any, answered: Callable[[Any], None]
    ) -> None:
        while True:
            try:
                answered(await method(request, wait_for_ready=True))
            except grpc.aio.AioRpcError as error:
                if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION):
                    return  # the run does not exist yet, or is over
                await asyncio.sleep(_PAUSE)
            else:
                return
