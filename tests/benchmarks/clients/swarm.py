"""Many nodes of one run in one process, each on its own connection, at the least possible cost of a client.

Requests are serialised before the measurement, and gRPC passes raw bytes. There is no back-off, no heartbeat and no
second attempt that could hide a failure: a stream that ends is lost, and counted.
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

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)
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
_LOOK = 0.25  # seconds between two reads of a server's CPU time
# Largest share of a core of an idle server. One that admits the requests of one client in turns uses 8 to 16 %.
_IDLE = 0.02
_IDLE_TIMEOUT = 60.0  # seconds
_SETTLE = 1.0  # seconds to wait for further losses, once a stream is lost

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"
Moment: TypeAlias = tuple[pb.Phase.ValueType, int]
"""An update for a node: a phase, and the number of the round in which it has ranks, 0 for none."""

JOINED: Moment = (pb.PHASE_UNSPECIFIED, 0)  # its lease: no update
FROZEN: Moment = (pb.PHASE_FROZEN, 1)
FINAL: Moment = (pb.PHASE_FINAL, 1)


class SwarmError(Exception):
    """The nodes did not reach the expected moment; the message has the number of those that did."""


@dataclass(slots=True)
class Notified:
    """The nodes that were notified of one moment: their number, and times by `time.perf_counter`."""

    count: int = 0
    first: float = 0.0
    last: float = 0.0

    def note(self, now: float) -> None:
        """Count one more notified node."""
        if not self.count:
            self.first = now
        self.last = now
        self.count += 1


@dataclass(frozen=True, slots=True)
class ServerCost:
    """The resources that a server process has used."""

    memory: int  # resident bytes
    cpu: float  # seconds, user and system

    @classmethod
    def of(cls, pid: int) -> ServerCost:
        """Read the current values."""
        return cls(psutil.Process(pid).memory_info().rss, time.clock_gettime(_cpu_clock(pid)))


@functools.cache
def _cpu_clock(pid: int) -> int:
    """Return the clock of a process's CPU time, in nanoseconds; psutil's has steps of 10 ms."""
    clock = ctypes.c_int()
    if error := ctypes.CDLL(None).clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, os.strerror(error))
    return clock.value


def join_requests(own: Iterable[int], *, places: int, max_restarts: int = 0) -> list[bytes]:
    """Return the first messages of nodes of a run whose rounds have exactly `places` nodes, so without a last call.

    The keep-alive interval is so long that no node must send heartbeats during a benchmark.
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
    """Return a failure report, which ends a round."""
    failure = pb.WorkerFailure(
        round=round_, role="trainer", host="host", pid=1, exit_code=1, message="it broke"
    )
    return pb.JoinRequest(worker_failed=failure).SerializeToString()


async def idle(server: int) -> None:
    """Wait until a server process has processed all messages sent to it."""
    used = -1.0
    async with asyncio.timeout(_IDLE_TIMEOUT):
        while (now := ServerCost.of(server).cpu) - used > _IDLE * _LOOK:
            used = now
            await asyncio.sleep(_LOOK)


PLAINTEXT = Plaintext()


async def ready(endpoint: str, security: ClientSecurity = PLAINTEXT) -> None:
    """Wait until a server listens. It also warms gRPC up in this process, before the measurement.

    Raises:
        SwarmError: The server does not listen in time.
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
    """Nodes that join, confirm every round in which they have ranks, and record the time of each update.

    As a context manager it closes all streams at its end; a process that ends anyway needs none.

    Attributes:
        `told`: the notified nodes of each moment.
        lost: number of streams that ended, by status; each is a failure.
        calls: streams, in the order of their requests.
        lease: the last lease that a node received.
        confirm: True if nodes confirm a round when they receive their ranks in it.
        last_message_bytes: size of the last message received.
    """

    def __init__(
        self,
        endpoint: str,
        requests: Sequence[bytes],
        *,
        confirm: bool = True,
        security: ClientSecurity = PLAINTEXT,
    ) -> None:
        """Create the nodes, without connecting.

        Args:
            endpoint: Address of the server.
            requests: Each node's first message.
            confirm: See the attribute.
            security: TLS settings of their connections.
        """
        self.told: dict[Moment, Notified] = defaultdict(Notified)
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
        """Let all nodes connect and join at once; return the time of the start."""
        began = time.perf_counter()
        self._lives = [asyncio.create_task(self._live(request)) for request in self._requests]
        return began

    async def reached(self, moment: Moment, timeout: float, count: int | None = None) -> Notified:
        """Wait until all nodes were notified of a moment, or `count` of them.

        Raises:
            SwarmError: Streams were lost, or `timeout` (seconds) is over.
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
        """Confirm a round for all nodes."""
        await asyncio.gather(*(call.write(_confirmation(round_)) for call in self.calls))

    def check_whole(self) -> None:
        """Check that no stream is lost.

        Raises:
            SwarmError: Some are.
        """
        if self.lost:
            raise SwarmError(f"streams lost: {dict(self.lost.most_common(3))}")

    def _open(self) -> _Call:
        # Do not wait for a connection: one that fails counts as a lost stream.
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
            pass  # the call's status code has more detail
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
    """Return a status message without the parts that differ between streams, so that equal losses count as equal."""
    return re.sub(r"\b(?=\w*\d)[0-9a-f]{4,}\b|\bnode-\d+\b", "…", details or "")[:_SENTENCE]


@functools.cache
def _confirmation(round_: int) -> bytes:
    confirm = pb.ConfirmRound(round=round_, master_port=29_500)
    return pb.JoinRequest(confirm=confirm).SerializeToString()
