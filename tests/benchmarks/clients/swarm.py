"""Many nodes of one run in one process, each on a connection of its own, at the least a client can cost.

Requests are serialised before the clock runs, bytes pass through gRPC as they are, and no back-off, no
heartbeat and no second attempt is there to hide anything: a stream that ends is lost, and counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import rallypoint.serving  # noqa: F401 (before gRPC is imported, it settles what gRPC may do in this process)
from rallypoint.rpc.endpoint import ClientSecurity, Plaintext

# isort: split
import grpc
import psutil
from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel

JOIN = "/rallypoint.rendezvous.v1.RendezvousService/Join"
HEARTBEAT = pb.JoinRequest(heartbeat=pb.Heartbeat()).SerializeToString()
RUN_ID = "benchmark"
_READY_TIMEOUT = 30.0  # seconds for a server to start
_SENTENCE = 160  # characters of an error
_LOOK = 0.25  # seconds between two looks at a server's CPU time
# Share of a core that an idle server uses at most. One that admits the requests of one client in turns uses 8 to 16 %.
_IDLE = 0.02
_IDLE_TIMEOUT = 60.0  # seconds
_SETTLE = 1.0  # seconds in which the other losses are awaited, once a stream is lost

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
Moment: TypeAlias = tuple[pb.Phase.ValueType, int]
"""What a node is told: a phase, and the number of the round in which it has a place, 0 for none."""

JOINED: Moment = (pb.PHASE_UNSPECIFIED, 0)  # its lease: no update
FROZEN: Moment = (pb.PHASE_FROZEN, 1)
FINAL: Moment = (pb.PHASE_FINAL, 1)


class SwarmError(Exception):
    """The nodes did not get where they were to get; the message says how far they came."""


@dataclass(slots=True)
class Told:
    """When nodes were told of one moment, by `time.perf_counter`, and how many were."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0

    def note(self, now: float) -> None:
        """One more node was told."""
        if not self.count:
            self.first = now
        self.last = now
        self.count += 1


@dataclass(frozen=True, slots=True)
class ServerCost:
    """What a server process has used."""

    memory: int  # resident bytes
    cpu: float  # seconds, user and system

    @classmethod
    def of(cls, pid: int) -> ServerCost:
        """As of now."""
        return cls(psutil.Process(pid).memory_info().rss, time.clock_gettime(_cpu_clock(pid)))


@functools.cache
def _cpu_clock(pid: int) -> int:
    """The clock of a process's CPU time, in nanoseconds; what psutil reads counts in steps of 10 ms."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


def join_requests(own: Iterable[int], *, places: int, max_restarts: int = 0) -> list[bytes]:
    """First messages of nodes of a run whose rounds take exactly `places` nodes, so that no last call delays one.

    Nobody has to send heartbeats for as long as a benchmark takes.
    """
    settings = pb.RunSettings(
        min_nodes=places,
        max_nodes=places,
        max_restarts=max_restarts,
        keep_alive_interval=Duration(seconds=60),
        restart_backoff=Duration(),
    )
    return [
        pb.JoinRequest(
            join=pb.JoinRun(
                run_id=RUN_ID,
                node_id=f"node-{number}",
                settings=settings,
                address=f"node-{number}.cluster.internal",
                local_world_size=8,
                role="trainer",
            )
        ).SerializeToString()
        for number in own
    ]


def worker_failed(round_: int) -> bytes:
    """A report that ends a round."""
    failure = pb.WorkerFailure(
        round=round_, role="trainer", host="host", pid=1, exit_code=1, message="it broke"
    )
    return pb.JoinRequest(worker_failed=failure).SerializeToString()


async def idle(server: int) -> None:
    """Wait until a server process has worked off what it was sent."""
    used = -1.0
    async with asyncio.timeout(_IDLE_TIMEOUT):
        while (now := ServerCost.of(server).cpu) - used > _IDLE * _LOOK:
            used = now
            await asyncio.sleep(_LOOK)


PLAINTEXT = Plaintext()


async def ready(endpoint: str, security: ClientSecurity = PLAINTEXT) -> None:
    """Wait until a server listens. It also warms gRPC up in this process, which is not what is measured.

    Raises:
        SwarmError: None does.
    """
    channel = open_channel(endpoint, security)
    try:
        async with asyncio.timeout(_READY_TIMEOUT):
            await channel.channel_ready()
    except TimeoutError:
        raise SwarmError(f"no server at {endpoint} within {_READY_TIMEOUT:g} s") from None
    finally:
        await channel.close()


class Swarm:
    """Nodes that join, confirm every round they have a place in, and note when they were told what.

    A context in which to leave them all; a process that ends anyway can do without.

    Attributes:
        told: when nodes were told of each moment.
        lost: streams that ended, by how. None is to.
        calls: streams, in the order of their requests.
        lease: what a node was given last.
        confirm: whether nodes confirm a round when they are told of their place in it.
        last_message_bytes: size of what was told last.
    """

    def __init__(
        self,
        endpoint: str,
        requests: Sequence[bytes],
        *,
        confirm: bool = True,
        security: ClientSecurity = PLAINTEXT,
    ) -> None:
        """Do nothing yet.

        Args:
            endpoint: Where the server is.
            requests: Each node's first message.
            confirm: See the attribute.
            security: Of their connections.
        """
        self.told: dict[Moment, Told] = defaultdict(Told)
        self.lost: Counter[str] = Counter()
        self.calls: list[_Call] = []
        self.lease = pb.Lease()
        self.confirm = confirm
        self.last_message_bytes = 0
        self._endpoint = endpoint
        self._security = security
        self._requests = requests
        self._channels: list[grpc.aio.Channel] = []
        self._lives: list[asyncio.Task[None]] = []
        self._awaited: Moment | None = None
        self._awaited_count = 0
        self._there = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in self._channels))

    def start(self) -> float:
        """Let all nodes connect and join at once; returns when that was."""
        began = time.perf_counter()
        self._lives = [asyncio.create_task(self._live(request)) for request in self._requests]
        return began

    async def reached(self, moment: Moment, timeout: float, count: int | None = None) -> Told:
        """Wait until all nodes were told of a moment, or `count` of them.

        Raises:
            SwarmError: Streams were lost, or the time (seconds) is over.
        """
        self._awaited, self._awaited_count = moment, len(self._requests) if count is None else count
        self._there.clear()
        if self.told[moment].count < self._awaited_count and not self.lost:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._there.wait()
        if self.lost:
            await asyncio.wait(self._lives, timeout=_SETTLE)
        if self.told[moment].count < self._awaited_count:
            phase, round_ = moment
            raise SwarmError(
                f"{self.told[moment].count} of {self._awaited_count} nodes were told "
                f"{pb.Phase.Name(phase)} of round {round_}"
                f"{'' if self.lost else f' within {timeout:g} s'}; "
                f"streams lost: {dict(self.lost.most_common(3)) or 'none'}"
            )
        return self.told[moment]

    async def confirm_round(self, round_: int) -> None:
        """Have all nodes confirm a round."""
        await asyncio.gather(*(call.write(_confirmation(round_)) for call in self.calls))

    def check_whole(self) -> None:
        """Check that no stream is lost.

        Raises:
            SwarmError: Some are.
        """
        if self.lost:
            raise SwarmError(f"streams lost: {dict(self.lost.most_common(3))}")

    def _open(self) -> _Call:
        # Not waiting for a connection: one that can't be made is lost, and counted.
        channel = open_channel(self._endpoint, self._security)
        self._channels.append(channel)
        call: _Call = channel.stream_stream(JOIN)()
        return call

    async def _live(self, request: bytes) -> None:
        call = self._open()
        self.calls.append(call)
        try:
            await call.write(request)
            while isinstance(data := await call.read(), bytes):
                await self._obey(call, data)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the call's own code says more
        self._lose(f"{(await call.code()).name} {_kind(await call.details())}".rstrip())

    async def _obey(self, call: _Call, data: bytes) -> None:
        response = pb.JoinResponse.FromString(data)
        if response.HasField("lease"):
            self.lease = response.lease
        update = response.update
        moment = (update.phase, update.assignment.round)
        told = self.told[moment]
        told.note(time.perf_counter())
        self.last_message_bytes = len(data)
        if moment == self._awaited and told.count >= self._awaited_count:
            self._there.set()
        if self.confirm and update.phase == pb.PHASE_FROZEN and moment[1]:
            await call.write(_confirmation(moment[1]))

    def _lose(self, how: str) -> None:
        self.lost[how] += 1
        self._there.set()


def _kind(details: str | None) -> str:
    """A sentence without what differs from stream to stream, so that equal losses are counted as equal."""
    return re.sub(r"\b(?=\w*\d)[0-9a-f]{4,}\b|\bnode-\d+\b", "…", details or "")[:_SENTENCE]


@functools.cache
def _confirmation(round_: int) -> bytes:
    confirm = pb.ConfirmRound(round=round_, master_port=29_500)
    return pb.JoinRequest(confirm=confirm).SerializeToString()
