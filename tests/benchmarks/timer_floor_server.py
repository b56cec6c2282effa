"""The floor of the timer service: a grpc.aio server on uvloop that decodes messages without further logic.

It serves the same method path under the server settings of the product, so that the same client measures both. It
has no table and checks nothing, and even a released timer expires.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import click

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it configures gRPC for this process)

# isort: split
import grpc
from google.protobuf.duration_pb2 import Duration

from rallypoint.rpc.loop import run
from rallypoint.serving.server import SERVER_ARGUMENTS
from rallypoint.timer.v1 import timer_service_pb2 as pb

_Context: TypeAlias = "grpc.aio.ServicerContext[pb.SuperviseRequest, pb.SuperviseResponse]"
_Stream: TypeAlias = Callable[[Any, _Context], Awaitable[None]]

LONGEST = 60
"""Seconds. Shorter timers count down; all others are ignored."""


def _response(**event: Any) -> pb.SuperviseResponse:
    return pb.SuperviseResponse(events=[pb.SuperviseEvent(**event)])


_SUBSCRIBED = pb.Subscribed(reoffer_interval=Duration(seconds=60))


async def decode(_: Any, context: _Context) -> None:
    """Admit an agent, then read its messages; reply to one that ends with a timer without a duration."""
    await context.read()
    await context.write(_response(subscribed=_SUBSCRIBED))
    while isinstance(request := await context.read(), pb.SuperviseRequest):
        last = request.actions[-1]
        if last.HasField("acquire") and not last.acquire.HasField("after"):
            await context.write(_response(refused=pb.Refused(scope=last.acquire.scope)))


async def count_down(_: Any, context: _Context) -> None:
    """Admit an agent, set a timer of the event loop for each short timer, and report when it expires."""
    due: asyncio.Queue[pb.Acquire] = asyncio.Queue()
    telling = asyncio.create_task(_send_expired(due, context))
    loop = asyncio.get_running_loop()
    subscribed = False
    try:
        while isinstance(request := await context.read(), pb.SuperviseRequest):
            if not subscribed:
                subscribed = True
                await context.write(_response(subscribed=_SUBSCRIBED))
            for action in request.actions:
                if action.HasField("acquire") and action.acquire.after.seconds < LONGEST:
                    loop.call_later(_left(action.acquire), due.put_nowait, action.acquire)
    finally:
        telling.cancel()


def _left(acquire: pb.Acquire) -> float:
    return acquire.after.ToTimedelta().total_seconds() - acquire.elapsed.ToTimedelta().total_seconds()


async def _send_expired(due: asyncio.Queue[pb.Acquire], context: _Context) -> None:
    number = 0
    while True:
        acquire = await due.get()
        number += 1
        expired = pb.Expired(
            expiry_id=number,
            worker_id=acquire.worker_id,
            scope=acquire.scope,
            after=acquire.after,
            sequence=acquire.sequence,
        )
        await context.write(_response(expired=expired))


BEHAVIOURS: dict[str, _Stream] = {"decode": decode, "count-down": count_down}


async def serve(port: int, behaviour: str) -> None:
    """Serve until killed."""
    supervise: Any = grpc.stream_stream_rpc_method_handler(
        BEHAVIOURS[behaviour],
        request_deserializer=pb.SuperviseRequest.FromString,
        response_serializer=pb.SuperviseResponse.SerializeToString,
    )
    server = grpc.aio.server(options=SERVER_ARGUMENTS)
    name = "rallypoint.timer.v1.TimerService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"Supervise": supervise}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--behaviour", type=click.Choice(list(BEHAVIOURS)), required=True)
def main(port: int, behaviour: str) -> None:
    """Serve on 127.0.0.1 until killed."""
    run(serve(port, behaviour))


if __name__ == "__main__":
    main()
