"""The interceptor of every call: it maps every exception to a status, and limits calls and messages.

A draining server accepts no new calls; each client has a rate of calls, each stream the message rate of its service.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from functools import lru_cache, partial
from traceback import clear_frames
from types import MappingProxyType, TracebackType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import Message

from rallypoint.rpc.errors import ServiceError, encode
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.access import Access, Permit
from rallypoint.serving.flow import Bucket, Buckets, Rate, Turns, client_of

log = get_logger(__name__)

Translate = Callable[[Exception], ServiceError | None]
"""Converts an exception that a service knows into its error; None for one that it does not know."""

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

# gRPC's own services (health, reflection) reply while the server drains, and the drain does not wait for them.
_OWN_TO_GRPC = "/grpc."
# Limit for one of their streams (reflection): far more than a person's tool sends.
_OWN_MESSAGES = Rate(200, 1_000)
# Clients whose rate is kept: a hostile client would need as many addresses to have its rate forgotten.
_MOST_CLIENTS = 16_384
# Requests of one client whose handlers run at the same time: enough to keep the process busy. More would wait inside
# gRPC, and the messages of other clients behind all of them.
_REQUESTS_AT_A_TIME = 16
# Earliest reconnection of a client whose stream was ended for its messages, seconds.
_STREAM_RETRY = 1.0
# Earliest retry of a watch beyond the client's limit, seconds.
_WATCH_RETRY = 5.0
# A client cannot act on these, so a handler that raises them has a bug.
_NEVER_SENT = (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)

# (request streaming, response streaming) -> the handler's attribute for its function, and the maker of such a handler.
_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Maps every exception of a handler to a status with details, counts open calls, and enforces the limits.

    A ServiceError is sent as it is; an exception known to `translate`, as the ServiceError it returns. Any other is a
    bug: it is logged with its traceback under an incident number, and the caller receives UNAVAILABLE with reason
    UNEXPECTED_ERROR and that number, never the exception's text. Cancellation and `context.abort` pass.

    Handlers are wrapped once per method, and each keeps its kind (coroutine or async generator), so that other
    interceptors see the same handlers as without this one.
    """

    def __init__(
        self,
        translate: Translate,
        *,
        new_incident: Callable[[], str] = lambda: secrets.token_hex(4),
        clock: Callable[[], float] = time.monotonic,
        request_rate: Rate | None = None,
        byte_rate: Rate | None = None,
        message_rates: Mapping[str, Rate] = MappingProxyType({}),
        access: Access | None = None,
        most_watches: int = 0,
    ) -> None:
        """Begin without a refusal.

        Args:
            translate: returns the error for an exception of the services; None for those it does not know.
            new_incident: returns a new number under which a bug is logged.
            clock: monotonic seconds.
            request_rate: calls that one client may begin; None: unlimited. Those of health and reflection are not
                counted: a client that floods a server must not make it look unhealthy to its orchestrator.
            byte_rate: bytes of single requests (not of streams) that one client may send; None: unlimited.
            message_rates: by the name of a service, the messages that a client may send on one of its streams.
            access: decides which calls may go on; None: all may. Not asked about health and reflection.
            most_watches: calls of one client that may be open at a time of those that answer one request with a stream,
                health watches included; 0: unlimited.
        """
        self.open_calls = 0
        self.refusal: ServiceError | None = None
        self.access = access
        self._translate = translate
        self._new_incident = new_incident
        self._clock = clock
        self._requests = None if request_rate is None else Buckets(request_rate, _MOST_CLIENTS)
        self._bytes = None if byte_rate is None else Buckets(byte_rate, _MOST_CLIENTS)
        self._turns_of = lru_cache(_MOST_CLIENTS)(lambda client: Turns(_REQUESTS_AT_A_TIME))
        self._message_rates = message_rates
        self._most_watches = most_watches
        self._watches: Counter[str] = Counter()
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def refuse(self, error: ServiceError) -> None:
        """From now on refuse every new call with `error`, except those of health and reflection."""
        self.refusal = error

    async def idle(self) -> None:
        """Wait until no call is open, except those of health and reflection."""
        await self._idle.wait()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Wrap the handler of a call that is about to start (gRPC's hook)."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        original, wrapped = self._wrapped.get(method, (None, None))
        if original is not handler:
            wrapped = _wrap(self, method, handler)
            self._wrapped[method] = (handler, wrapped)
        return wrapped

    def excess(self, client: str, size: int = 0) -> ServiceError | None:
        """Count a call of a client and the bytes of its request; return the error if either exceeds its rate."""
        now = self._clock()
        if self._requests is not None and (wait := self._requests.take(client, now)):
            return _too_many(f"this client sends too many requests: wait {wait:.3f} s", wait)
        if self._bytes is not None and (wait := self._bytes.take(client, now, size)):
            return _too_many(f"this client sends too many bytes: wait {wait:.3f} s", wait)
        return None

    def metered(self, method: str, messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """Return the messages of a stream; they end with an error if they exceed the rate."""
        service = method[1:].partition("/")[0]
        rate = _OWN_MESSAGES if method.startswith(_OWN_TO_GRPC) else self._message_rates.get(service)
        return messages if rate is None else _Metered(messages, rate, self._clock)

    def turn_of(self, client: str) -> AbstractAsyncContextManager[None]:
        """Return a context for the handler of one request of a client, in which it waits for the client's turn."""
        return self._turns_of(client).turn()

    def begin_watch(self, client: str) -> None:
        """Count a watch of a client that begins; raise the error if the client has too many."""
        if self._most_watches and self._watches[client] >= self._most_watches:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_WATCHERS",
                f"client {client!r} has {self._most_watches} open streams, the most that one client may have: end some "
                "of them, or start the server with a higher --max-watches-per-client",
                metadata={"limit": str(self._most_watches)},
                retry_after=_WATCH_RETRY,
            )
        self._watches[client] += 1

    def end_watch(self, client: str) -> None:
        """Count the end of a watch."""
        self._watches[client] -= 1
        if not self._watches[client]:
            del self._watches[client]

    def opened(self) -> None:
        """Count a call that has started."""
        self.open_calls += 1
        self._idle.clear()

    def closed(self) -> None:
        """Count a call that has ended."""
        self.open_calls -= 1
        if self.open_calls == 0:
            self._idle.set()

    def answer(self, method: str, error: BaseException) -> ServiceError:
        """Return the error for a call whose handler raised `error`."""
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
    """One call, as the context in which its handler runs. An exception of the handler becomes the call's status.

    The status is set, and nothing is raised: gRPC keeps the exception that its `abort` raises, whose traceback holds
    the call and all objects of its handler. Only the garbage collector frees such a cycle, and until it runs, every
    refused request would stay in memory, up to 4 MiB each.
    """

    __slots__ = (
        "_calls",
        "_context",
        "_counted",
        "_is_counted_watch",
        "_method",
        "_permit",
        "_watches",
        "client",
    )

    def __init__(self, calls: CallInterceptor, method: str, context: Any, *, watches: bool = False) -> None:
        self._calls = calls
        self._method = method
        self._context = context
        self._counted = not method.startswith(_OWN_TO_GRPC)
        self._permit: Permit | None = None
        self._watches = watches
        self._is_counted_watch = False
        self.client = client_of(context.peer())

    def __enter__(self) -> _HandledCall:
        if self._counted:
            self._calls.opened()
        return self

    def admit(self, request: Any) -> None:
        """Raise the error with which the call is refused before its handler begins, if any.

        Args:
            request: the bytes of the request; the messages of a stream are counted as they are read.
        """
        if self._counted:
            size = len(request) if isinstance(request, bytes) else 0
            refusal = self._calls.refusal or self._calls.excess(self.client, size)
            if refusal is not None:
                # An exception that is raised many times would collect every traceback.
                raise refusal.with_traceback(None)
            if (access := self._calls.access) is not None:
                self._permit = access.begin(self._method, self._context)

    def permitted(self, request: Any) -> Any:
        """Return the decoded request, or a stream of them, for the handler; raise the error if it is refused."""
        if self._permit is not None:
            if not isinstance(request, Message):
                return self._permit.check_each(request)
            self._permit.check(request)
        if self._watches:
            self._calls.begin_watch(self.client)
            self._is_counted_watch = True
        return request

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        try:
            if error is None or self._passes(error):
                return False
            self._end(self._missing(error) or self._calls.answer(self._method, error))
            # Other cycles: a future that a handler waits for, and the exception that it ends with.
            clear_frames(traceback)
            return True
        finally:
            if self._is_counted_watch:
                self._calls.end_watch(self.client)
            if self._counted:
                self._calls.closed()

    def _missing(self, error: BaseException) -> ServiceError | None:
        """Return the error for a method that a service declares and does not implement."""
        # Generated code does this in place of a handler; NotImplementedError alone may have other sources.
        if isinstance(error, NotImplementedError) and self._context.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ServiceError(
                grpc.StatusCode.UNIMPLEMENTED, "NOT_IMPLEMENTED", f"not implemented: {self._method}"
            )
        return None

    def _passes(self, error: BaseException) -> bool:
        if isinstance(error, asyncio.CancelledError):
            # A cancellation of this call passes. One that leaked out of an awaitable of the handler must not:
            # gRPC would send no status at all, and the client would wait for its deadline or for ever.
            task = asyncio.current_task()
            return task is not None and task.cancelling() > 0
        if not isinstance(error, Exception):
            return True
        # The call has its status already (aborted), or its client has disconnected and a write to it failed; the
        # exceptions that grpc.aio raises for its misuse do not count as that.
        gone = isinstance(error, grpc.aio.BaseError) and not isinstance(error, grpc.aio.UsageError)
        return gone or self._context.done()

    def _end(self, error: ServiceError) -> None:
        status = encode(error)
        self._context.set_code(status.code)
        self._context.set_details(status.details)
        self._context.set_trailing_metadata((*self._context.trailing_metadata(), *status.trailing_metadata))


class _Metered:
    """A stream's messages, counted when the next is requested; a class, because a generator's step costs more."""

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
    """Return the same handler inside a `_HandledCall`.

    gRPC decodes a single request before the handler runs and encodes a single response after it, both outside every
    interceptor, and reports failures as UNKNOWN. So that happens in here too.
    """
    name, make = _KINDS[handler.request_streaming, handler.response_streaming]
    behaviour = getattr(handler, name)
    checked = _checked(method, handler.request_deserializer or _unchanged)
    # A stream's messages are decoded one by one while the handler reads them, so their errors are mapped too.
    before: Callable[[Any], Any] = checked
    on_stream = None
    if handler.request_streaming:
        before, on_stream = partial(calls.metered, method), checked
    encode_ = handler.response_serializer or _unchanged
    watches = handler.response_streaming and not handler.request_streaming

    async def answer_once(request: Any, context: Any) -> Any:
        with _HandledCall(calls, method, context) as call:
            call.admit(request)
            async with calls.turn_of(call.client):
                answer = await behaviour(call.permitted(before(request)), context)
            # gRPC sends no message with a status other than OK, and such a handler may return None.
            if context.code() in (None, grpc.StatusCode.OK):
                return encode_(answer)
        return b""

    async def answer_with_each(request: Any, context: Any) -> AsyncIterator[Any]:
        with _HandledCall(calls, method, context, watches=watches) as call:
            call.admit(request)
            async with aclosing(behaviour(call.permitted(before(request)), context)) as answers:
                async for answer in answers:
                    yield encode_(answer)

    async def let_it_write(request: Any, context: Any) -> None:
        with _HandledCall(calls, method, context, watches=watches) as call:
            call.admit(request)
            await behaviour(call.permitted(before(request)), context)

    if not handler.response_streaming:
        return make(answer_once, on_stream, None)
    if inspect.isasyncgenfunction(behaviour):
        return make(answer_with_each, on_stream, None)
    return make(let_it_write, on_stream, _unless_encoded(encode_))


def _unless_encoded(encode_: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return an encoder that leaves bytes as they are: a message to many subscribers is encoded once."""
    return lambda message: message if type(message) is bytes else encode_(message)


def _checked(method: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_refuse(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception:
            raise ServiceError(
                grpc.StatusCode.INVALID_ARGUMENT,
                "MALFORMED_MESSAGE",
                f"the {len(data)} bytes sent to {method} are not a valid message of its .proto file",
            ) from None

    return decode_or_refuse


def _unchanged(value: Any) -> Any:
    return value
