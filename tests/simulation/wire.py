"""gRPC as far as our services and their clients use it, over the simulated network.

Stubs and servicers are the generated ones, messages are sent as bytes, and the product's interceptor wraps every
handler, so that errors are mapped, sent and decoded as in production.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, Protocol

import grpc

from simulation.clockwork import Process
from simulation.network import ATTEMPT, LONGEST_RECONNECT, Connection, Item, Link, Listener, Network

# The end of a call: code, details, trailing metadata.
Status = tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]
_IDLE, _CONNECTING = grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING
_READY, _FAILED = grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE
_CANCELLED: Status = (grpc.StatusCode.CANCELLED, "Locally cancelled by application!", ())


class ClientCall:
    """The client's end of a call: written to and read from until its status arrives."""

    def __init__(
        self,
        channel: Channel,
        method: str,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        wait_for_ready: bool,
    ) -> None:
        self.process = channel.process
        self.link = channel.link
        self.wait_for_ready = wait_for_ready
        self.target = channel.target
        self._method = method
        self._serialize = serialize
        self._deserialize = deserialize
        self._connection: Connection | None = None
        self._sent_metadata = asyncio.Event()
        self._inbox: deque[bytes] = deque()
        self._news = asyncio.Event()
        self._status: Status | None = None
        channel.network.dial(self)

    @property
    def over(self) -> bool:
        """True once it has its status."""
        return self._status is not None

    def connected(self, connection: Connection) -> None:
        """Take the new connection."""
        self._connection = connection
        connection.up.send(("open", self._method))
        if self.link.stalled:
            connection.up.stall(self.link.stalled)
        connection.down.send(("connected", None))

    def receive(self, item: Item) -> None:
        """Take an item that arrives."""
        kind, value = item
        if kind == "connected":
            self._sent_metadata.set()
        elif kind == "data":
            if self._status is None:
                self._inbox.append(value)
        elif kind == "status":
            self._end(value)
        else:
            self._end((grpc.StatusCode.UNAVAILABLE, value, ()))
        self._news.set()

    def _end(self, status: Status) -> None:
        if self._status is None:
            self._status = status
        self._sent_metadata.set()
        if self._connection is not None:
            self._connection.ended("client")

    async def wait_for_connection(self) -> None:
        """Return when there is a connection."""
        await self._sent_metadata.wait()
        if self._status is not None:
            self._raise_for_status()

    async def write(self, message: Any) -> None:
        """Send a message."""
        if self._status is not None and not self._inbox:
            raise asyncio.InvalidStateError("RPC already finished.")
        await self._sent_metadata.wait()
        if self._status is not None:
            self._raise_for_status()
            return
        assert self._connection is not None, "metadata is sent over a connection"
        self._connection.up.send(("data", self._serialize(message)))
        await asyncio.sleep(0)

    async def done_writing(self) -> None:
        """Half-close the call: send nothing more."""
        if self._status is None and self._connection is not None:
            self._connection.up.send(("half-close", None))

    async def read(self) -> Any:
        """Return the next message; EOF if the call ended with OK."""
        while not self._inbox and self._status is None:
            self._news.clear()
            await self._news.wait()
        if self._inbox:
            assert self._connection is not None, "messages come over a connection"
            self._connection.taken()
            return self._deserialize(self._inbox.popleft())
        self._raise_for_status()
        return grpc.aio.EOF

    def _raise_for_status(self) -> None:
        assert self._status is not None, "raised when there is one"
        code, details, trailing = self._status
        if self._status is _CANCELLED:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise grpc.aio.AioRpcError(
                code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details=details
            )

    def cancel(self) -> bool:
        """End the call."""
        if self._status is not None:
            return False
        if self._connection is not None:
            self._connection.up.send(("gone", None))
        self._end(_CANCELLED)
        self._inbox.clear()
        self._news.set()
        return True


class Channel:
    """A channel to the service, from which stubs are made."""

    def __init__(self, process: Process, link: Link, network: Network, target: str = "") -> None:
        self.process = process
        self.link = link
        self.network = network
        self.target = target
        self._state = grpc.ChannelConnectivity.IDLE
        self._met: Listener | None = None
        self._changed = asyncio.Event()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """Return READY if a server listens at the other end. Calls have connections of their own."""
        if self._state is _READY and self.network.listening(self.target) is not self._met:
            self._enter(_IDLE)
        if self._state is _IDLE and try_to_connect:
            self._enter(_CONNECTING)
            self._try(self.network.clockwork.now)
        return self._state

    async def wait_for_state_change(self, last: grpc.ChannelConnectivity) -> None:
        """Return once the state is not `last`."""
        while self._state is last:
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _enter(self, state: grpc.ChannelConnectivity) -> None:
        self._state = state
        self.process.call_soon(self._changed.set)

    def _try(self, since: float) -> None:
        network, chance = self.network, self.network.random
        network.clockwork.after(self.link.latency * chance.uniform(0.5, 2.0), self._knock, since)

    def _knock(self, since: float) -> None:
        network, chance = self.network, self.network.random
        if not self.process.alive:
            return
        if not self.link.whole and network.clockwork.now < since + ATTEMPT:
            network.clockwork.after(chance.uniform(0.2, 1.0), self._try, since)
            return
        self._met = network.listening(self.target) if self.link.whole else None
        self._enter(_FAILED if self._met is None else _READY)
        if self._met is None:
            pause = chance.uniform(0.1, LONGEST_RECONNECT)
            network.clockwork.after(pause, self._enter, _IDLE)

    def stream_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., ClientCall]:
        """Return a method with a stream of requests and a stream of responses."""

        def call(wait_for_ready: bool = False, **_: Any) -> ClientCall:
            return ClientCall(self, method, request_serializer, response_deserializer, wait_for_ready)

        return call

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., AsyncIterator[Any]]:
        """Return a method with one request and a stream of responses."""

        async def answers(request: Any, wait_for_ready: bool = False) -> AsyncIterator[Any]:
            call = ClientCall(self, method, request_serializer, response_deserializer, wait_for_ready)
            try:
                await call.write(request)
                await call.done_writing()
                while (answer := await call.read()) is not grpc.aio.EOF:
                    yield answer
            finally:
                call.cancel()

        return answers

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any, **_: Any
    ) -> Callable[..., Awaitable[Any]]:
        """Return a method with one request and one response."""

        async def answer(
            request: Any, wait_for_ready: bool = False, timeout: float | None = None, **_: Any
        ) -> Any:
            call = ClientCall(self, method, request_serializer, response_deserializer, wait_for_ready)
            try:
                async with asyncio.timeout(timeout):
                    await call.write(request)
                    await call.done_writing()
                    return await call.read()
            except TimeoutError:
                none = grpc.aio.Metadata()
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.DEADLINE_EXCEEDED, none, none, details="Deadline Exceeded"
                ) from None
            finally:
                call.cancel()

        return answer


class Observer(Protocol):
    """An observer of the messages that a server receives and sends."""

    def heard(self, call: ServerCall, message: Any) -> None:
        """The handler takes a message."""

    def told(self, call: ServerCall, message: Any) -> None:
        """The server sends a message."""

    def answered(self, call: ServerCall, status: Status) -> None:
        """The server sends a status."""


class ServerCall:
    """The server's end of a call: the context of its handler, and the messages of its client."""

    def __init__(self, connection: Connection, method: str, handler: Any, observer: Observer) -> None:
        self.method = method
        self.process = connection.server
        # True while a message waits until the client has room for it.
        self.blocked = False
        # Data of the observer about the call.
        self.subject: Any = None
        self._connection = connection
        self._handler = handler
        self._observer = observer
        self._inbox: deque[bytes] = deque()
        self._closed = False
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._gone = False
        # The time at which its connection broke, by the world's clock.
        self.broken_at: float | None = None
        self._code: grpc.StatusCode | None = None
        self._details = ""
        self._trailing: tuple[Any, ...] = ()
        self._task = self.process.create_task(self._serve())

    @property
    def broken(self) -> bool:
        """True if its connection is broken, even if this end does not know yet."""
        return self._connection.broken

    def receive(self, item: Item) -> None:
        """Take an item that arrives."""
        kind, value = item
        if kind == "data":
            self._inbox.append(value)
        elif kind == "credit":
            self._room.set()
            return
        else:
            self._closed = True
            if kind == "gone" and not self._gone:
                self._gone = True
                self.broken_at = self._connection.network.clockwork.now
                self._connection.ended("server")
                self._task.cancel()
        self._news.set()

    def __aiter__(self) -> ServerCall:
        return self

    async def __anext__(self) -> Any:
        while not self._inbox:
            if self._closed:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        message = self._handler.request_deserializer(self._inbox.popleft())
        self._observer.heard(self, message)
        return message

    async def _serve(self) -> None:
        handler = self._handler
        try:
            request = self if handler.request_streaming else await self._request()
            if handler.response_streaming:
                behaviour = handler.stream_stream or handler.unary_stream
                if inspect.isasyncgenfunction(behaviour):
                    await self._write_all(behaviour(request, self))
                else:
                    await behaviour(request, self)
            else:
                answer = await handler.unary_unary(request, self)
                if self._code is None:
                    self._send(answer, raw=True)
        except grpc.aio.AbortError:
            pass
        except asyncio.CancelledError:
            if not self._gone:
                raise
        except Exception as error:
            self.process.call_exception_handler({"message": "a call failed", "exception": error})
        self._finish()

    async def _write_all(self, answers: Any) -> None:
        async with aclosing(answers):
            async for answer in answers:
                await self.write(answer)

    def _finish(self) -> None:
        if self._gone:
            return
        self._gone = True
        status = self._code or grpc.StatusCode.OK, self._details, self._trailing
        self._observer.answered(self, status)
        self._connection.down.send(("status", status))
        self._connection.ended("server")

    async def _request(self) -> Any:
        while not self._inbox:
            self._news.clear()
            await self._news.wait()
        data = self._inbox.popleft()
        decode = self._handler.request_deserializer
        return decode(data) if decode is not None else data

    async def send_initial_metadata(self, _metadata: object) -> None:
        """Do nothing: headers have no effect here."""

    async def write(self, message: Any) -> None:
        """Send a message, as soon as the client has room for it."""
        self._observer.told(self, message)
        while self._connection.untaken >= self._connection.window:
            self.blocked = self._connection.starved = True
            self._room.clear()
            await self._room.wait()
        self.blocked = False
        if self._gone:
            raise grpc.aio.InternalError("the client has gone")
        self._send(message)
        await asyncio.sleep(0)

    def _send(self, message: Any, raw: bool = False) -> None:
        encode = self._handler.response_serializer
        data = message if raw or encode is None else encode(message)
        self._connection.untaken += 1
        if self.process.cpu is not None:
            self.process.cpu.sent()
        self._connection.down.send(("data", data))

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """End with an error."""
        self.set_code(code)
        self.set_details(details)
        self.set_trailing_metadata(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")

    def set_code(self, code: grpc.StatusCode) -> None:
        """Set the code with which the call ends."""
        self._code = code

    def set_details(self, details: str) -> None:
        """Set the message of the status."""
        self._details = details

    def set_trailing_metadata(self, trailing: Any) -> None:
        """Set the trailing metadata, for programs."""
        self._trailing = tuple(trailing)

    def trailing_metadata(self) -> tuple[Any, ...]:
        return self._trailing

    def code(self) -> grpc.StatusCode | None:
        return self._code

    def details(self) -> str:
        return self._details

    def auth_context(self) -> dict[str, list[bytes]]:
        """Return nothing: no client has a certificate."""
        return {}

    def peer(self) -> str:
        """Return the address of the client."""
        return "ipv4:10.0.0.1:40000"

    def invocation_metadata(self) -> tuple[Any, ...]:
        """Return an empty tuple: clients send no metadata."""
        return ()

    def done(self) -> bool:
        """Return True if nothing can be sent any more."""
        return self._gone
