"""Around every call that a server takes: no exception leaves it unmapped, and there are bounds to what it takes.

A draining server takes no more; one client takes no more than its rate, nor a stream than that of its service.
"""

from __future__ import annotations

import asyncio
import inspect
import ipaddress
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import lru_cache, partial
from traceback import clear_frames
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias
from urllib.parse import unquote

import grpc

from rallypoint.rpc.errors import ServiceError, encode
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.flow import Bucket, Buckets, Rate

# ---- Whom a peer address of gRPC stands for when it is counted who asks how often.


# A connection keeps its address, and asks again and again. 65,536: several times the connections of a large service;
# each entry takes about 300 bytes.
@lru_cache(maxsize=65_536)
def client_of(peer: str) -> str:
    """The client behind `context.peer()`: its host, whatever the port.

    An IPv6 client is its /64: whoever has one address of it has them all. Unix sockets have no address, so everybody
    at the service's own socket is one client. A certificate doesn't count, nor a token: a fleet often shares one, and
    the address of a connection can't be forged.
    """
    scheme, _, place = peer.partition(":")
    if scheme == "ipv4":
        return place.rpartition(":")[0]
    if scheme == "ipv6":
        # As in ipv6:%5Bfe80::1%25eth0%5D:50051; the brackets are encoded by some versions only.
        host = unquote(place).rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            return str(ipaddress.IPv6Network((host, 64), strict=False))
        except ValueError:
            return host
    return scheme


log = get_logger(__name__)

Translate = Callable[[Exception], ServiceError | None]
"""Turns an exception that a service knows into its answer; None for one that it does not know."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# gRPC's own services (health, reflection) answer while the server drains, and nobody waits for them to end.
_OWN_TO_GRPC = "/grpc."
# What one of their streams (reflection) may ask: far more than a person's tool does.
_OWN_MESSAGES = Rate(200, 1_000)
# Clients whose rate is kept track of: a hostile one would need as many addresses to be forgotten.
_MOST_CLIENTS = 16_384
# When a client whose stream was ended for its messages is to come back, seconds, at the earliest.
_STREAM_RETRY = 1.0
# They tell a caller nothing it could act on, so a handler that raises them has a bug.
_NEVER_SENT = (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)

# (request streaming, response streaming) -> where a handler keeps its function, and what makes such a handler.
_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps every exception of a handler to a status with details, counts open calls, and refuses what is too much.

    A ServiceError is sent as it is; what `translate` knows, as the ServiceError it returns. Anything else is a
    bug: it is logged with its traceback under an incident number, and the caller gets UNAVAILABLE with reason
    UNEXPECTED_ERROR and that number, never the exception's text. Cancellation and `context.abort` pass.

    Handlers are wrapped once per method, and each keeps its shape (coroutine or async generator), so that other
    interceptors see what they would see without this one.
    """

    def __init__(
        self,
        translate: Translate,
        *,
        new_incident: Callable[[], str] = lambda: secrets.token_hex(4),
        clock: Callable[[], float] = time.monotonic,
        request_rate: Rate | None = None,
        message_rates: Mapping[str, Rate] = MappingProxyType({}),
    ) -> None:
        """Refuses nothing yet.

        Args:
            translate: the answer to an exception of the services' own; None for those it does not know.
            new_incident: makes up the number under which a bug is logged.
            clock: monotonic seconds.
            request_rate: calls that one client may begin; None: any number. Those of health and reflection don't
                count: whoever floods a server must not make it look ill to its orchestrator.
            message_rates: by the name of a service, what a client may send on one of its streams.
        """
        self.open_calls = 0
        self.refusal: ServiceError | None = None
        self._translate = translate
        self._new_incident = new_incident
        self._clock = clock
        self._requests = None if request_rate is None else Buckets(request_rate, _MOST_CLIENTS)
        self._message_rates = message_rates
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse(self, error: ServiceError) -> None:
        """From now on answers every new call with `error`, except those of health and reflection."""
        self.refusal = error

    async def idle(self) -> None:
        """Waits until no call is open, those of health and reflection aside."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """gRPC's hook: wraps the handler of a call that is about to start."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        original, wrapped = self._wrapped.get(method, (None, None))
        if original is not handler:
            wrapped = _wrap(self, method, handler)
            self._wrapped[method] = (handler, wrapped)
        return wrapped

    def excess(self, peer: str) -> ServiceError | None:
        """Counts a call of a client; returns the answer to it if that is one too many."""
        if self._requests is None:
            return None
        wait = self._requests.take(client_of(peer), self._clock())
        if wait == 0.0:
            return None
        return _too_many(f"this client asks too often: wait {wait:.3f} s", wait)

    def metered(self, method: str, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """The messages of a stream, ended with an error if they come too quickly."""
        service = method[1:].partition("/")[0]
        rate = _OWN_MESSAGES if method.startswith(_OWN_TO_GRPC) else self._message_rates.get(service)
        return messages if rate is None else _Metered(messages, rate, self._clock)

    def opened(self) -> None:
        """A call has started."""
        self.open_calls += 1
        self._idle.clear()

    def closed(self) -> None:
        """A call has ended."""
        self.open_calls -= 1
        if self.open_calls == 0:
            self._idle.set()

    def answer(self, method: str, error: BaseException) -> ServiceError:
        """The answer to a call whose handler raised `error`."""
        if isinstance(error, Exception):
            try:
                known = error if isinstance(error, ServiceError) else self._translate(error)
            except Exception as failure:
                failure.__context__ = error
                known, error = None, failure
            if known is not None and known.code not in _NEVER_SENT:
                log.debug("call refused", method=method, code=known.code.name, reason=known.reason)
                return known
        incident = self._new_incident()
        log.exception("unexpected error in a call", error=error, method=method, incident=incident)
        return ServiceError(
            grpc.StatusCode.UNAVAILABLE,
            "UNEXPECTED_ERROR",
            f"unexpected error, incident {incident}: the server's log has the cause",
            metadata={"incident": incident},
            retry_after=1.0,
        )


class _HandledCall:
    """One call, as the context in which its handler runs. What the handler raises becomes the call's status.

    The status is set, and nothing is raised: gRPC keeps the exception that its `abort` raises, whose traceback holds
    the call and all that its handler had in hand. Only the garbage collector takes such a circle apart, and until it
    comes by, every refused request would stay in memory, up to 4 MiB each.
    """

    __slots__ = ("_calls", "_context", "_counted", "_method")

    def __init__(self, calls: CallInterceptor, method: str, context: Any) -> None:
        self._calls = calls
        self._method = method
        self._context = context
        self._counted = not method.startswith(_OWN_TO_GRPC)

    def __enter__(self) -> _HandledCall:
        if self._counted:
            self._calls.opened()
        return self

    def admit(self) -> None:
        """Raises why the call is refused before its handler begins, if it is."""
        if self._counted:
            refusal = self._calls.refusal or self._calls.excess(self._context.peer())
            if refusal is not None:
                # One that is raised again and again would collect every traceback.
                raise refusal.with_traceback(None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if error is None or self._passes(error):
                return False
            self._end(self._missing(error) or self._calls.answer(self._method, error))
            # Other circles: a future that a handler waits for, and the exception that it ends with.
            clear_frames(traceback)
            return True
        finally:
            if self._counted:
                self._calls.closed()

    def _missing(self, error: BaseException) -> ServiceError | None:
        """The answer where a service has left a method of its contract out, as gRPC's own health does with List."""
        # What generated code does in the place of a handler; NotImplementedError alone may come from anywhere.
        if isinstance(error, NotImplementedError) and self._context.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ServiceError(
                grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", f"this server doesn't have {self._method}"
            )
        return None

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, asyncio.CancelledError):
            # A cancellation of this very call passes. One that leaked out of something the handler awaited
            # must not: gRPC would send no status at all, and the client would wait for its deadline or for ever.
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        if not isinstance(error, Exception):
            return True
        # The call has its status already (aborted), or its client is gone and a write to it failed; what grpc.aio
        # raises for its misuse does not count as that.
        gone = isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)
        return gone or self._context.done()

    def _end(self, error: ServiceError) -> None:
        status = encode(error)
        self._context.set_code(status.code)
        self._context.set_details(status.details)
        self._context.set_trailing_metadata((*self._context.trailing_metadata(), *status.trailing_metadata))


class _Metered:
    """A stream's messages, each counted when the next is asked for: a bare step costs less than a generator's."""

    __slots__ = ("_bucket", "_clock", "_next")

    def __init__(self, messages: AsyncIterator[Any], rate: Rate, clock: Callable[[], float]) -> None:
        self._next = aiter(messages).__anext__
        self._clock = clock
        self._bucket = Bucket(rate, clock())

    def __aiter__(self) -> _Metered:
        return self

    def __anext__(self) -> Awaitable[Any]:
        wait = self._bucket.take(self._clock())
        if wait > 0.0:
            raise _too_many("too many messages came on this stream: send fewer", max(wait, _STREAM_RETRY))
        return self._next()


def _too_many(message: str, retry_after: float) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_REQUESTS", message, retry_after=retry_after
    )


def _wrap(calls: CallInterceptor, method: str, handler: Handler) -> Handler:
    """The same handler inside a `_HandledCall`.

    gRPC decodes a single request before the handler runs and encodes a single answer after it, both out of
    reach of any interceptor and with UNKNOWN for what fails. So that happens in here too.
    """
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behaviour = getattr(handler, name)
    checked = _checked(method, handler.request_deserializer or _unchanged)
    # A stream's messages are decoded one by one while the handler reads them, within reach of the mapping.
    before: Callable[[Any], Any] = checked
    on_stream = None
    if handler.request_streaming:
        before, on_stream = partial(calls.metered, method), checked
    encode_ = handler.response_serializer or _unchanged
    if not handler.response_streaming:
        return make(_single(calls, method, behaviour, before, encode_), on_stream, None)
    if inspect.isasyncgenfunction(behaviour):
        return make(_generator(calls, method, behaviour, before, encode_), on_stream, None)
    return make(_writer(calls, method, behaviour, before), on_stream, handler.response_serializer)


def _single(
    calls: CallInterceptor,
    method: str,
    behaviour: Callable[[Any, Any], Awaitable[Any]],
    before: Callable[[Any], Any],
    encode_: Callable[[Any], Any],
) -> Callable[[Any, Any], Awaitable[Any]]:
    async def answer_once(request: Any, context: Any) -> Any:
        with _HandledCall(calls, method, context) as call:
            call.admit()
            answer = await behaviour(before(request), context)
            # gRPC sends no message with a status other than OK, and such a handler may well return None.
            if context.code() in (None, grpc.StatusCode.OK):
                return encode_(answer)
        return b""

    return answer_once


def _generator(
    calls: CallInterceptor,
    method: str,
    behaviour: Callable[[Any, Any], Any],
    before: Callable[[Any], Any],
    encode_: Callable[[Any], Any],
) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def answer_with_each(request: Any, context: Any) -> AsyncIterator[Any]:
        with _HandledCall(calls, method, context) as call:
            call.admit()
            async with aclosing(behaviour(before(request), context)) as answers:
                async for answer in answers:
                    yield encode_(answer)

    return answer_with_each


def _writer(
    calls: CallInterceptor,
    method: str,
    behaviour: Callable[[Any, Any], Awaitable[None]],
    before: Callable[[Any], Any],
) -> Callable[[Any, Any], Awaitable[None]]:
    async def let_it_write(request: Any, context: Any) -> None:
        with _HandledCall(calls, method, context) as call:
            call.admit()
            await behaviour(before(request), context)

    return let_it_write


def _checked(method: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_refuse(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "MALFORMED_MESSAGE",
                f"a message of {len(data)} bytes sent to {method} is not what its .proto file says",
            ) from None

    return decode_or_refuse


def _unchanged(value: Any) -> Any:
    return value
