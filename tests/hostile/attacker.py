"""Sends hostile requests, and reports the end of each of them."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from hostile.insider import Insider
from hostile.requests import Request
from rallypoint.rpc.channel import CLIENT_ARGUMENTS
from rallypoint.rpc.errors import decode

# Text of the client's library, with INTERNAL, if it writes to a stream that the server has just ended, before it
# has read the status. The status itself is lost then.
_OWN_WORDS = "Internal error from Core"
# A call must end by itself at its deadline; a client that hangs longer has found a bug, in one library or another.
_OVERDUE = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a request."""

    code: grpc.StatusCode
    reason: str = ""
    """The reason in the error's ErrorInfo; empty: there is none, as in errors of gRPC itself."""
    message: str = ""
    gone: bool = False
    """True if the sender left before the end."""
    answers: int = 0
    """Number of messages received."""


class Attacker:
    """Some connections to a server. Any bytes may be sent on them; nothing is checked before."""

    def __init__(self, address: str, connections: int, insider: Insider) -> None:
        # An honest client itself refuses to send messages that the server wouldn't accept.
        options = (*CLIENT_ARGUMENTS, ("grpc.max_send_message_length", -1))
        self._insider = insider
        self._channels = [grpc.aio.insecure_channel(address, options) for _ in range(connections)]

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    async def send(self, request: Request) -> Outcome:
        """Send a request; return its outcome.

        Raises:
            TimeoutError: It has no end, long after its deadline.
        """
        request = self._insider.armed(request)
        call = _start(self._channels[request.number % len(self._channels)], request)
        try:
            async with asyncio.timeout(request.timeout + _OVERDUE):
                return await self._followed_for_a_while(call, request)
        finally:
            call.cancel()

    async def _followed_for_a_while(self, call: Any, request: Request) -> Outcome:
        if request.cancel_after is None:
            return await self._followed(call, request)
        try:
            async with asyncio.timeout(request.cancel_after):
                return await self._followed(call, request)
        except TimeoutError:
            return Outcome(grpc.StatusCode.CANCELLED, gone=True)

    async def _followed(self, call: Any, request: Request) -> Outcome:
        answers = 0
        try:
            if isinstance(call, grpc.aio.UnaryUnaryCall):
                await call
                return Outcome(grpc.StatusCode.OK, answers=1)
            if isinstance(call, grpc.aio.StreamStreamCall):
                await _send_messages(call, request)
            while answers < request.most_answers:
                if (answer := await call.read()) is grpc.aio.EOF:
                    return Outcome(await call.code(), answers=answers)
                answers += 1
                self._insider.learn(request, answer)
            if not request.half_close:
                return Outcome(grpc.StatusCode.OK, gone=True, answers=answers)
            while await call.read() is not grpc.aio.EOF:
                answers += 1
            return Outcome(await call.code(), answers=answers)
        except grpc.aio.AioRpcError as error:
            if error.details() == _OWN_WORDS:
                return Outcome(grpc.StatusCode.CANCELLED, gone=True, answers=answers)
            decoded = decode(error)
            known = decoded.reason != decoded.code.name
            # If a reason has the name of its code, INVALID_ARGUMENT, the details distinguish it from gRPC's own errors.
            ours = known or bool(decoded.field_violations)
            return Outcome(decoded.code, decoded.reason if ours else "", decoded.message, answers=answers)


def _start(channel: grpc.aio.Channel, request: Request) -> Any:
    method = request.method
    kind = "unary_unary"
    if method is not None and method.server_streaming:
        kind = "stream_stream" if method.client_streaming else "unary_stream"
    # Without serializers, bytes are sent unchanged.
    begin = getattr(channel, kind)(request.path)
    messages = () if kind == "stream_stream" else request.messages[:1]
    return begin(*messages, timeout=request.timeout)


async def _send_messages(call: Any, request: Request) -> None:
    # The server need not read to the end: the end of the call is read afterwards.
    with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError, grpc.aio.BaseError):
        for data in request.messages:
            await call.write(data)
        if request.half_close:
            await call.done_writing()
