"""The floor: a grpc.aio server on uvloop that moves messages and thinks nothing.

It serves the method paths of the rendezvous service under the server settings of the product, and passes bytes
through as they are, so that one and the same client measures both. What a measured service costs above it is
what the service does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import click

import rallypoint.serving  # noqa: F401 (before gRPC is imported, it settles what gRPC may do in this process)

# isort: split
import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.loop import run
from rallypoint.serving.server import SERVER_ARGUMENTS

_Context: TypeAlias = "grpc.aio.ServicerContext[bytes, bytes]"
_Stream: TypeAlias = Callable[[Any, _Context], Awaitable[None]]
_Unary: TypeAlias = Callable[[bytes, _Context], Awaitable[bytes]]

ASSIGNMENT_BYTES = 200
_LEASE = pb.JoinResponse(lease=pb.Lease(number=1, revision=1)).SerializeToString()


def _update(phase: pb.Phase.ValueType, round_: int, size: int = ASSIGNMENT_BYTES) -> bytes:
    """What a node is told, of exactly `size` bytes; 0 for `round_`: without a place."""

    def padded(padding: int) -> bytes:
        update = pb.NodeUpdate(revision=1, phase=phase)
        if round_:
            update.assignment.round = round_
        update.last_round_end.detail = "x" * padding
        return pb.JoinResponse(update=update).SerializeToString()

    # From 128 bytes on, the lengths within take two bytes each; small messages are a few bytes off.
    padding = max(0, size - (len(padded(128)) - 128))
    return padded(padding)


_FROZEN = _update(pb.PHASE_FROZEN, 1)
_FINAL = _update(pb.PHASE_FINAL, 1)


class Floor:
    """What a bare server can do for one benchmark, each of the methods on its own."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of what is told to everybody."""
        self._size = size
        self._contexts: list[_Context] = []
        self._letting_in = asyncio.Lock()
        self._round = 1
        self._released = asyncio.Event()

    async def one_message(self, _: Any, context: _Context) -> None:
        """Read one message, write one; stay open."""
        await context.read()
        await context.write(_FROZEN)
        await context.read()

    async def same_messages(self, _: Any, context: _Context) -> None:
        """As many messages each way as a node and the service exchange until the node is told FINAL."""
        await context.read()
        await context.write(_LEASE)
        await context.write(_FROZEN)
        await context.read()
        await context.write(_FINAL)
        await context.read()

    async def read_on(self, _: Any, context: _Context) -> None:
        """Let a node in, then read what it says."""
        await context.read()
        await context.write(_FINAL)
        while isinstance(await context.read(), bytes):
            pass

    async def tell_all(self, _: Any, context: _Context) -> None:
        """Let a node in, then tell everybody something whenever it says something."""
        await self._let_in(context, _FINAL)
        while isinstance(await context.read(), bytes):
            self._round += 1
            await self._tell(_update(pb.PHASE_FROZEN, self._round, self._size))

    async def tell_of_loss(self, _: Any, context: _Context) -> None:
        """Let a node in, then tell everybody else when its stream breaks."""
        await self._let_in(context, _LEASE, _FINAL)
        try:
            await context.read()
        finally:
            # The handler is cancelled where it waits; what it leaves to be done needs a task of its own.
            self._contexts.remove(context)
            self._telling = asyncio.create_task(self._tell(_update(pb.PHASE_JOINABLE, 0, self._size)))

    async def _let_in(self, context: _Context, *messages: bytes) -> None:
        await context.read()
        async with self._letting_in:
            for message in messages:
                await context.write(message)
            self._contexts.append(context)

    async def _tell(self, message: bytes) -> None:
        async with self._letting_in:  # a node may have its message before the write is over here
            pass
        await asyncio.gather(*(context.write(message) for context in self._contexts))

    async def answer(self, _: bytes, __: _Context) -> bytes:
        """Answer with nothing."""
        return b""

    async def hold_back(self, _: bytes, __: _Context) -> bytes:
        """Answer with nothing, and not before `release`."""
        await self._released.wait()
        return b""

    async def release(self, _: bytes, __: _Context) -> bytes:
        """Let everybody have an answer."""
        self._released.set()
        return b""


def behaviours(floor: Floor) -> dict[str, tuple[_Stream, Mapping[str, _Unary]]]:
    """What Join does, and what each call of the store does."""
    return {
        "one-message": (floor.one_message, {}),
        "same-messages": (floor.same_messages, {}),
        "read-on": (floor.read_on, {}),
        "tell-all": (floor.tell_all, {}),
        "tell-of-loss": (floor.tell_of_loss, {}),
        "answer": (floor.read_on, {"Set": floor.answer, "Get": floor.answer, "Add": floor.answer}),
        "release": (floor.read_on, {"Get": floor.hold_back, "Set": floor.release}),
    }


async def serve(port: int, behaviour: str, size: int) -> None:
    """Serve until killed."""
    stream, calls = behaviours(Floor(size))[behaviour]
    join: Any = grpc.stream_stream_rpc_method_handler(stream)
    store: Any = {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()}
    server = grpc.aio.server(options=SERVER_ARGUMENTS)
    package = "rallypoint.rendezvous.v1"
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(f"{package}.RendezvousService", {"Join": join}),
            grpc.method_handlers_generic_handler(f"{package}.StoreService", store),
        )
    )
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--behaviour", type=click.Choice(list(behaviours(Floor(0)))), required=True)
@click.option("--size", type=int, default=ASSIGNMENT_BYTES, help="Bytes of what is told to everybody.")
def main(port: int, behaviour: str, size: int) -> None:
    """Serve on 127.0.0.1 until killed."""
    run(serve(port, behaviour, size))


if __name__ == "__main__":
    main()
