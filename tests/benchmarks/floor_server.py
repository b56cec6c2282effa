"""The floor: a grpc.aio server on uvloop that moves messages without any logic.

It serves the method paths of the rendezvous service under the server settings of the product, and passes bytes
through without decoding, so that the same client measures both. The difference between the two is the cost of the
service's own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias

import click

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)

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
    """Return an update for a node, of exactly `size` bytes; with `round_` 0 it has no assignment."""

    def padded(padding: int) -> bytes:
        update = pb.NodeUpdate(revision=1, phase=phase)
        if round_:
            update.assignment.round = round_
        update.last_round_end.detail = "x" * padding
        return pb.JoinResponse(update=update).SerializeToString()

    # From 128 bytes on, the inner length fields take two bytes each; small messages are a few bytes off.
    padding = max(0, size - (len(padded(128)) - 128))
    return padded(padding)


_FROZEN = _update(pb.PHASE_FROZEN, 1)
_FINAL = _update(pb.PHASE_FINAL, 1)


class Floor:
    """Behaviours of a bare server; each method serves one benchmark."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of each message that is sent to all nodes."""
        self._size = size
        self._contexts: list[_Context] = []
        self._letting_in = asyncio.Lock()
        self._round = 1
        self._released = asyncio.Event()

    async def one_message(self, _: Any, context: _Context) -> None:
        """Read one message, write one; keep the stream open."""
        await context.read()
        await context.write(_FROZEN)
        await context.read()

    async def same_messages(self, _: Any, context: _Context) -> None:
        """Exchange as many messages as a node and the service do until the node receives FINAL."""
        await context.read()
        await context.write(_LEASE)
        await context.write(_FROZEN)
        await context.read()
        await context.write(_FINAL)
        await context.read()

    async def read_on(self, _: Any, context: _Context) -> None:
        """Admit a node, then read its messages."""
        await context.read()
        await context.write(_FINAL)
        while isinstance(await context.read(), bytes):
            pass

    async def notify_all(self, _: Any, context: _Context) -> None:
        """Admit a node, then send an update to all nodes for each message of this one."""
        await self._let_in(context, _FINAL)
        while isinstance(await context.read(), bytes):
            self._round += 1
            await self._send_to_all(_update(pb.PHASE_FROZEN, self._round, self._size))

    async def notify_of_loss(self, _: Any, context: _Context) -> None:
        """Admit a node, then notify all other nodes when its stream breaks."""
        await self._let_in(context, _LEASE, _FINAL)
        try:
            await context.read()
        finally:
            # The waiting handler is cancelled; its last work needs a task of its own.
            self._contexts.remove(context)
            self._sending = asyncio.create_task(self._send_to_all(_update(pb.PHASE_JOINABLE, 0, self._size)))

    async def _let_in(self, context: _Context, *messages: bytes) -> None:
        await context.read()
        async with self._letting_in:
            for message in messages:
                await context.write(message)
            self._contexts.append(context)

    async def _send_to_all(self, message: bytes) -> None:
        async with self._letting_in:  # a node may receive its message before the write returns here
            pass
        await asyncio.gather(*(context.write(message) for context in self._contexts))

    async def answer(self, _: bytes, __: _Context) -> bytes:
        """Reply with an empty message."""
        return b""

    async def hold_back(self, _: bytes, __: _Context) -> bytes:
        """Reply with an empty message, after `release`."""
        await self._released.wait()
        return b""

    async def release(self, _: bytes, __: _Context) -> bytes:
        """Let all `hold_back` calls return."""
        self._released.set()
        return b""


def behaviours(floor: Floor) -> dict[str, tuple[_Stream, Mapping[str, _Unary]]]:
    """Return by name the handler of Join and those of the store's calls."""
    return {
        "one-message": (floor.one_message, {}),
        "same-messages": (floor.same_messages, {}),
        "read-on": (floor.read_on, {}),
        "tell-all": (floor.notify_all, {}),
        "tell-of-loss": (floor.notify_of_loss, {}),
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
