"""Client process of `timer-requests`: agents that send timer requests as fast as the service accepts them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)
from rallypoint.rpc.endpoint import Plaintext

# isort: split
import grpc
from google.protobuf.duration_pb2 import Duration

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import RUN_ID, ServerCost, SwarmError, idle, ready
from rallypoint.rpc.channel import open_channel
from rallypoint.timer.v1 import timer_service_pb2 as pb

SUPERVISE = "/rallypoint.timer.v1.TimerService/Supervise"
_LAST = "last"
_WORKERS = 16  # of an agent

_Call: TypeAlias = "grpc.aio.StreamStreamCall[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class RequestsOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        server: its process id.
        agents: number of agents, each with its own connection and stream.
        batch: actions in one message, half of them acquires and half releases; even.
        seconds: duration of the measurement.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    server: int
    agents: int
    batch: int
    seconds: float
    timeout: float


@dataclass(frozen=True, slots=True)
class RequestsResult:
    """Accepted requests per second, and CPU seconds of the server for each."""

    rate: float
    cpu: float


def _message(actions: Sequence[pb.SuperviseAction]) -> bytes:
    return pb.SuperviseRequest(actions=actions).SerializeToString()


def _scopes(order: RequestsOrder, half: int) -> list[tuple[str, str, int]]:
    """Return worker, scope and number of the timers of one of the two alternating messages."""
    count = order.batch // 2
    return [
        (f"{number % _WORKERS}@1", f"/workspace/train.py#{half * count + number}", half * count + number + 1)
        for number in range(count)
    ]


def messages(order: RequestsOrder) -> list[bytes]:
    """Return two messages, each of which releases the timers that the other acquires."""
    both = [_scopes(order, half) for half in (0, 1)]
    after = Duration(seconds=60)
    return [
        _message(
            [
                *(
                    pb.SuperviseAction(release=pb.Release(worker_id=worker, scope=scope))
                    for worker, scope, _ in both[1 - half]
                ),
                *(
                    pb.SuperviseAction(
                        acquire=pb.Acquire(
                            worker_id=worker,
                            scope=scope,
                            after=after,
                            elapsed=Duration(nanos=20_000_000),
                            sequence=number,
                        )
                    )
                    for worker, scope, number in both[half]
                ),
            ]
        )
        for half in (0, 1)
    ]


class _Agent:
    """An agent's stream; it counts its messages."""

    def __init__(self, order: RequestsOrder, number: int) -> None:
        subscribe = pb.Subscribe(run_id=RUN_ID, node_id=f"node-{number}", lease=1)
        self._first = _message(
            [pb.SuperviseAction(subscribe=subscribe), pb.SuperviseAction(registered=pb.Registered())]
        )
        self._order = order
        self._call: _Call = open_channel(order.endpoint, Plaintext()).stream_stream(SUPERVISE)()

    async def subscribe(self) -> None:
        await self._call.write(self._first)
        await self._until("subscribed")

    async def send(self, both: Sequence[bytes], until: float) -> int:
        """Send until then; return the number of messages when the server has processed the last one."""
        sent = 0
        while time.perf_counter() < until:
            await self._call.write(both[sent % 2])
            sent += 1
        # The server processes messages in order, and replies only to a timer without a duration.
        refused = pb.Acquire(worker_id="0@1", scope=_LAST, sequence=2**40)
        await self._call.write(_message([pb.SuperviseAction(acquire=refused)]))
        await self._until("refused")
        return sent

    async def _until(self, event: str) -> None:
        while isinstance(data := await self._call.read(), bytes):
            for each in pb.SuperviseResponse.FromString(data).events:
                if each.WhichOneof("event") == event:
                    return
                raise SwarmError(f"waited for {event!r} and was told: {each}")
        raise SwarmError(f"a stream ended: {(await self._call.code()).name} {await self._call.details()}")


async def requests(order: RequestsOrder) -> RequestsResult:
    """Carry out the order.

    Raises:
        SwarmError: A stream was lost, or an acquire was refused.
    """
    await ready(order.endpoint)
    both = messages(order)
    agents = [_Agent(order, number) for number in range(order.agents)]
    try:
        async with asyncio.timeout(order.timeout):
            await asyncio.gather(*(agent.subscribe() for agent in agents))
            await idle(order.server)
            before = ServerCost.of(order.server)
            began = time.perf_counter()
            sent = await asyncio.gather(*(agent.send(both, began + order.seconds) for agent in agents))
            took = time.perf_counter() - began
    except TimeoutError:
        raise SwarmError(f"the requests were not taken within {order.timeout:g} s") from None
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise SwarmError(f"a stream was lost: {error}") from None
    count = sum(sent) * order.batch
    return RequestsResult(count / took, (ServerCost.of(order.server).cpu - before.cpu) / count)


if __name__ == "__main__":
    carry_out(RequestsOrder, requests)
