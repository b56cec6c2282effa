"""Client process of `store`: calls without pause, and many calls that wait for one key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)
from rallypoint.rpc.endpoint import Plaintext

# isort: split
import grpc
from google.protobuf.duration_pb2 import Duration

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import FINAL, RUN_ID, Swarm, idle, join_requests, ready
from rallypoint.rendezvous.v1 import store_service_pb2 as pb
from rallypoint.rpc.channel import open_channel

_Call: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_PATH = "/rallypoint.rendezvous.v1.StoreService/"
_VALUE = b"v" * 100
_AWAITED = "awaited"


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A request to the client process.

    Attributes:
        endpoint: address of the server.
        server: its process id.
        callers: number of callers, each with its own connection and one call in flight.
        each: number of calls of a kind that each makes, one after another.
        waiting: number of calls that wait for one key, each on its own connection; 0: not measured.
        timeout: seconds until it counts as failed.
    """

    endpoint: str
    server: int
    callers: int
    each: int
    waiting: int
    timeout: float


@dataclass(frozen=True, slots=True)
class StoreResult:
    """The result of an order.

    Attributes:
        set, get, add: calls per second, all callers together; 0 if not measured.
        first, last: seconds from setting the awaited key until the first and the last waiting call returned.
    """

    set: float
    get: float
    add: float
    first: float
    last: float


async def store(order: StoreOrder) -> StoreResult:
    """Carry out the order.

    Raises:
        AioRpcError: A call failed.
    """
    await ready(order.endpoint)
    # The store belongs to a run, and a run needs a node.
    node = Swarm(order.endpoint, join_requests(range(1), places=1))
    node.start()
    await node.reached(FINAL, order.timeout)
    writer = pb.StoreWriter(node_id="node-0", lease=node.lease.number, token=node.lease.token)
    async with asyncio.timeout(order.timeout):
        if order.waiting:
            first, last = await _waited(order, writer)
            return StoreResult(0, 0, 0, first, last)
        rates = {name: await _rate(order, name, partial(make, writer)) for name, make in _REQUESTS.items()}
        return StoreResult(rates["Set"], rates["Get"], rates["Add"], 0, 0)


def _operation(caller: int, slot: int, number: int) -> pb.StoreOperation:
    """Return an operation id, which every client of ours sends, so that the service detects a repeated write."""
    return pb.StoreOperation(client_id=f"client-{caller}", slot=slot, sequence=number + 1)


def _set(writer: pb.StoreWriter, caller: int, number: int) -> bytes:
    operation = _operation(caller, 0, number)
    return pb.SetRequest(
        run_id=RUN_ID, key=f"key/{caller}", value=_VALUE, operation=operation, writer=writer
    ).SerializeToString()


def _get(_: pb.StoreWriter, caller: int, number: int) -> bytes:
    return pb.GetRequest(run_id=RUN_ID, key=f"key/{caller}").SerializeToString()


def _add(writer: pb.StoreWriter, caller: int, number: int) -> bytes:
    operation = _operation(caller, 1, number)
    return pb.AddRequest(
        run_id=RUN_ID, key=f"sum/{caller}", amount=1, operation=operation, writer=writer
    ).SerializeToString()


# In this order: Get reads the keys of Set.
_REQUESTS = {"Set": _set, "Get": _get, "Add": _add}


async def _connected(endpoint: str, method: str, count: int) -> list[_Call]:
    channels = [open_channel(endpoint, Plaintext()) for _ in range(count)]
    await asyncio.gather(*(channel.channel_ready() for channel in channels))
    return [channel.unary_unary(_PATH + method) for channel in channels]


async def _rate(order: StoreOrder, method: str, request: Callable[[int, int], bytes]) -> float:
    calls = await _connected(order.endpoint, method, order.callers)

    async def go_on(call: _Call, requests: Sequence[bytes]) -> None:
        for each in requests:
            await call(each)

    requests = [[request(caller, number) for number in range(order.each)] for caller in range(order.callers)]
    began = time.perf_counter()
    async with asyncio.TaskGroup() as calling:
        for call, own in zip(calls, requests, strict=True):
            calling.create_task(go_on(call, own))
    return order.callers * order.each / (time.perf_counter() - began)


async def _waited(order: StoreOrder, writer: pb.StoreWriter) -> tuple[float, float]:
    calls = await _connected(order.endpoint, "Get", order.waiting)
    (release,) = await _connected(order.endpoint, "Set", 1)
    wait = pb.GetRequest(run_id=RUN_ID, key=_AWAITED, timeout=Duration(seconds=600)).SerializeToString()
    released = pb.SetRequest(run_id=RUN_ID, key=_AWAITED, value=_VALUE, writer=writer).SerializeToString()
    answered: list[float] = []

    async def have(call: _Call) -> None:
        await call(wait)
        answered.append(time.perf_counter())

    async with asyncio.TaskGroup() as waiting:
        for call in calls:
            waiting.create_task(have(call))
        await asyncio.sleep(0)
        await idle(order.server)  # the server does not report when the last call waits
        began = time.perf_counter()
        await release(released)
    return answered[0] - began, answered[-1] - began


if __name__ == "__main__":
    carry_out(StoreOrder, store)
