"""Client process of `etcd`: writes without pause to etcd itself, or to fenced states of the service.

Several of these run at the same time; each counts the replies within the same few seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)
from rallypoint.rpc.endpoint import Plaintext

# isort: split
import grpc

from benchmarks.clients.command import carry_out
from benchmarks.clients.swarm import SwarmError, ready
from rallypoint.etcd.client import EtcdClient
from rallypoint.etcd.endpoint import parse_address
from rallypoint.etcd.values import Put, Txn
from rallypoint.rendezvous.v1 import state_service_pb2 as pb
from rallypoint.rendezvous.v1 import store_service_pb2 as store_pb
from rallypoint.rpc.channel import open_channel

_SET = "/rallypoint.rendezvous.v1.StateService/SetState"
_VALUE = b"v" * 100

_Call: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
Write: TypeAlias = Callable[[int], Awaitable[None]]
"""Performs the n-th write of one caller."""


@dataclass(frozen=True, slots=True)
class EtcdOrder:
    """A request to the client process.

    Attributes:
        kind: "puts" to etcd, or "states" of the service.
        target: URL of the etcd, or endpoint of the service.
        first: number of the first caller; each has its own key, or its own run and connection.
        callers: number of callers, each with one write in flight.
        begin: start of the count, by the clock `time.monotonic`, which all processes share.
        seconds: duration of the count.
    """

    kind: str
    target: str
    first: int
    callers: int
    begin: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EtcdResult:
    """Number of writes with a reply in that time, and the seconds of the slowest."""

    writes: int
    slowest: float


async def etcd(order: EtcdOrder) -> EtcdResult:
    """Carry out the order.

    Raises:
        SwarmError: The writers were not ready in time, or a write had no effect.
    """
    numbers = range(order.first, order.first + order.callers)
    writers = await (_puts if order.kind == "puts" else _states)(order.target, numbers)
    end = order.begin + order.seconds
    counted: list[float] = []

    async def go_on(write: Write) -> None:
        number = 0
        while (sent := time.monotonic()) < end:
            await write(number)
            number += 1
            if order.begin <= (answered := time.monotonic()) < end:
                counted.append(answered - sent)

    # One write of each, to connect and to warm up.
    await asyncio.gather(*(write(-1) for write in writers))
    if time.monotonic() > order.begin:
        raise SwarmError("the writers were not ready in time")
    async with asyncio.TaskGroup() as writing:
        for write in writers:
            writing.create_task(go_on(write))
    return EtcdResult(len(counted), max(counted))


async def _puts(url: str, numbers: range) -> list[Write]:
    client = EtcdClient(parse_address(url))

    def writer(key: bytes) -> Write:
        async def write(_: int) -> None:
            await client.transact(Txn([], [Put(key, _VALUE)]))

        return write

    return [writer(f"{client.address.prefix}/{number}".encode()) for number in numbers]


async def _states(endpoint: str, numbers: range) -> list[Write]:
    await ready(endpoint)

    def writer(caller: int) -> Write:
        call: _Call = open_channel(endpoint, Plaintext()).unary_unary(_SET)
        token: bytes | None = None

        async def write(number: int) -> None:
            nonlocal token
            operation = store_pb.StoreOperation(client_id=f"client-{caller}", slot=0, sequence=number + 2)
            request = pb.SetStateRequest(
                run_id=f"run-{caller}", state=_VALUE, token=token, operation=operation
            )
            answer = pb.SetStateResponse.FromString(await call(request.SerializeToString()))
            if not answer.has_set:
                raise SwarmError("a state was not set, though its token was the current one")
            token = answer.current.token

        return write

    return [writer(number) for number in numbers]


if __name__ == "__main__":
    carry_out(EtcdOrder, etcd)
