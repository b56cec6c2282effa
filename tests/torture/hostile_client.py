"""A program that takes all that one service grants to one client: hostile_client.py, its Plan as JSON on stdin.

It prints its Loot as JSON when complete, and holds all of it until it is killed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc.aio

from hostile.campaign import Report, barrage
from hostile.insider import Insider
from hostile.kinds import RENDEZVOUS
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import state_service_pb2 as state_pb
from rallypoint.rendezvous.v1 import state_service_pb2_grpc as state_grpc
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rendezvous.v1 import store_service_pb2_grpc as store_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.durations import to_duration
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.rpc.errors import decode
from rallypoint.serving.server import raise_open_files

# HTTP/2 (RFC 9113): the client's preface with a SETTINGS frame, and the head of a PING reply.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
_PONG = bytes((0, 0, 8, 6, 1, 0, 0, 0, 0))
_HEAD, _PING = 9, 6
# Requests that wait for a response at the same time, for each limit to be filled.
_AT_ONCE = 16
# Two runs have stores, nodes and watchers; the others only exist.
_RUNS = ("greedy-0", "greedy-1")
# A lease that lasts for the whole attack without heartbeats.
_SETTINGS = pb.RunSettings(
    min_nodes=1, max_nodes=1, keep_alive_interval=to_duration(300.0), disconnect_grace=to_duration(1.0)
)


@dataclass(frozen=True, slots=True)
class Plan:
    """An attack on the service at this address, with this address of it for idle connections."""

    host: str
    port: int
    requests: int
    """Hostile requests."""
    connections: int
    """Idle connections: every other one has sent nothing at all, the rest HTTP/2."""
    value_bytes: int
    """The size of each value in a store."""


@dataclass(slots=True)
class Loot:
    """The quantity that it got of each resource, and the reasons why not more."""

    taken: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, list[str]] = field(default_factory=dict)
    requests: int = 0
    faults: list[str] = field(default_factory=list)
    """Faults of the responses to hostile requests."""


class _Idle(asyncio.Protocol):
    """A connection that only replies to pings, so that it is kept."""

    def __init__(self, *, speaks: bool) -> None:
        self._speaks = speaks
        self._unread = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._speaks:
            transport.write(_PREFACE)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        while len(self._unread) >= (end := _HEAD + int.from_bytes(self._unread[:3])):
            frame, self._unread = self._unread[:end], self._unread[end:]
            if frame[3] == _PING and not frame[4]:
                self._transport.write(_PONG + frame[_HEAD:])
            if len(self._unread) < _HEAD:
                return

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()


class _Greedy:
    """Takes as much as possible of each resource, all at the same time."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._endpoint = f"{plan.host}:{plan.port}".replace("::1:", "[::1]:")
        self._channel = open_channel(self._endpoint, Plaintext())
        self._runs = pb_grpc.RendezvousServiceStub(self._channel)
        self._stores = store_grpc.StoreServiceStub(self._channel)
        self._states = state_grpc.StateServiceStub(self._channel)
        self._value = os.urandom(plan.value_bytes)
        self._held: list[object] = []
        self._writers: dict[str, store_pb.StoreWriter] = {}
        self.loot = Loot()

    async def take(self) -> None:
        """Return when it can get no more."""
        idle = await asyncio.gather(*(self._connect(number) for number in range(self._plan.connections)))
        for number in range(len(_RUNS)):
            await self._node(-1 - number)
        report = Report(seed=1)
        async with asyncio.TaskGroup() as tasks:
            for what, begin in (
                ("state", self._state),
                ("run", self._run),
                ("node", self._node),
                ("watch", self._watch),
                ("watch_state", self._watch_state),
            ):
                tasks.create_task(self._until_refused(what, begin))
            tasks.create_task(self._fill_stores())
            tasks.create_task(
                barrage(self._endpoint, RENDEZVOUS, report, Insider(), range(self._plan.requests))
            )
        self.loot.requests, self.loot.faults = report.sent, report.faults
        self.loot.taken["connections"] = len(idle)
        self.loot.taken["idle"] = sum(each.is_open for each in idle)

    async def _until_refused(self, what: str, begin: Callable[[int], Awaitable[None]]) -> None:
        """Call `begin` with one number after the other, until each of the concurrent callers was refused."""
        numbers, refusals = itertools.count(), set[str]()

        async def begin_one_after_another() -> int:
            taken = 0
            while True:
                try:
                    await begin(next(numbers))
                    taken += 1
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                    refused = decode(error)
                    if refused.reason == "TOO_MANY_REQUESTS":
                        await asyncio.sleep(refused.retry_after or 0)
                        continue
                    refusals.add(refused.reason)
                    return taken

        counts = await asyncio.gather(*(begin_one_after_another() for _ in range(_AT_ONCE)))
        self.loot.taken[what], self.loot.refusals[what] = sum(counts), sorted(refusals)

    async def _connect(self, number: int) -> _Idle:
        loop, plan = asyncio.get_running_loop(), self._plan
        _, idle = await loop.create_connection(lambda: _Idle(speaks=number % 2 == 0), plan.host, plan.port)
        return idle

    async def _fill_stores(self) -> None:
        """Fill one store, and then another, for which there is less room."""
        for run_id in _RUNS:

            async def set_value(number: int, run_id: str = run_id) -> None:
                request = store_pb.SetRequest(run_id=run_id, key=f"k{number}", value=self._value)
                request.writer.CopyFrom(self._writers[run_id])
                await self._stores.Set(request)

            await self._until_refused(f"values of {run_id}", set_value)

    async def _state(self, number: int) -> None:
        await self._states.SetState(
            state_pb.SetStateRequest(run_id=f"state-{number}", state=self._value[:1024])
        )

    async def _run(self, number: int) -> None:
        call = self._runs.Join()
        await call.write(_join(f"greedy-run-{number}", "a"))
        await _first(call)
        await call.write(pb.JoinRequest(leave=pb.LeaveRun(reason="another")))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass

    async def _node(self, number: int) -> None:
        call, run_id = self._runs.Join(), _RUNS[number % len(_RUNS)]
        node_id = f"node{number}"
        await call.write(_join(run_id, node_id))
        lease = (await self._hold(call)).lease
        if run_id not in self._writers:
            self._writers[run_id] = store_pb.StoreWriter(
                node_id=node_id, lease=lease.number, token=lease.token
            )

    async def _watch(self, number: int) -> None:
        run_id = _RUNS[0]
        if number % 2:
            await self._hold(self._runs.WatchRun(pb.WatchRunRequest(run_id=run_id)))
        else:
            await self._hold(self._runs.WatchEvents(pb.WatchEventsRequest(run_id=run_id)))

    async def _watch_state(self, number: int) -> None:
        await self._hold(self._states.WatchState(state_pb.WatchStateRequest(run_id=f"state-{number}")))

    async def _hold(self, call: Any) -> Any:
        first = await _first(call)
        self._held.append(asyncio.create_task(_read_on(call)))
        return first


def _join(run_id: str, node_id: str) -> pb.JoinRequest:
    join = pb.JoinRun(run_id=run_id, node_id=node_id, settings=_SETTINGS, address=node_id)
    join.local_world_size = 1
    return pb.JoinRequest(join=join)


async def _first(call: Any) -> Any:
    first = await call.read()
    assert first is not grpc.aio.EOF, "a stream ended before its first message"
    return first


async def _read_on(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def _attack(plan: Plan) -> None:
    greedy = _Greedy(plan)
    await greedy.take()
    print(json.dumps(asdict(greedy.loot)), flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    # The nodes stand for other hosts; this process may use only the rest of this machine.
    os.nice(19)
    raise_open_files()
    asyncio.run(_attack(Plan(**json.loads(sys.stdin.readline()))))
