"""One server process: from binding its port to the end of its last call."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.rpc import error_details_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from rallypoint.rpc.channel import MAX_MESSAGE_BYTES
from rallypoint.rpc.durations import set_seconds
from rallypoint.rpc.endpoint import (
    Endpoint,
    PortInUseError,
    ServerOptions,
    ServiceStartError,
    SettingError,
    listening_endpoint,
)
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.logs import filter_grpc_logs, get_logger
from rallypoint.rpc.loop import signalled
from rallypoint.rpc.tls import server_credentials, transport
from rallypoint.server.v1.server_service_pb2 import ServerLimits
from rallypoint.server.v1.server_service_pb2_grpc import add_ServerServiceServicer_to_server
from rallypoint.serving.access import Access
from rallypoint.serving.audit import Audit
from rallypoint.serving.flow import Rate
from rallypoint.serving.info import (
    INSTANCE,
    SERVICE_NAME,
    SHORTEST_PING_INTERVAL,
    Capability,
    ServerServicer,
    describe_server,
)
from rallypoint.serving.interceptor import CallInterceptor, Translate
from rallypoint.serving.policy import EVERY_ROLE, Policy, Rights
from rallypoint.serving.tokens import TokenKeys

# ---- The check that an address is free, and the error if it is not.


async def check_free(endpoint: Endpoint) -> None:
    """Try the address before gRPC does.

    gRPC does not report why it fails, and accepts a name with one address in use (localhost as ::1 and
    127.0.0.1) as long as another one is free.

    Raises:
        ServiceStartError: another program listens there, or listening there is impossible.
    """
    if endpoint.path is not None:
        _check_socket_free(endpoint, endpoint.path)
        return
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ServiceStartError(
            f"cannot find the address of {endpoint.host} ({error.strerror}): change --host"
        ) from None
    failures = [_attempt(family, address) for family, _, _, _, address in found]
    if errno.EADDRINUSE in failures:
        raise PortInUseError(f"{endpoint} is in use: choose another --port, or stop what listens there")
    if errno.EACCES in failures:
        raise ServiceStartError(f"no permission to listen on {endpoint}: choose a --port from 1024 up")
    if None not in failures:
        reason = os.strerror(failures[0] or 0)
        raise ServiceStartError(f"{endpoint.host} is no address of this machine ({reason}): change --host")


def _attempt(family: int, address: tuple[object, ...]) -> int | None:
    """Bind the address and release it at once; return the errno of a failure, or None."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As gRPC does: connections of an earlier server that the kernel still keeps do not matter.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.errno
    return None


def _check_socket_free(endpoint: Endpoint, path: str) -> None:
    folder = os.path.dirname(path)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ServiceStartError(
            f"cannot make a socket in {folder}: no such folder or no permission (--host {endpoint})"
        )
    if not os.path.lexists(path):
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            probe.connect(path)
    except ConnectionRefusedError:
        # The socket file of a server that was killed; gRPC replaces it.
        return
    except OSError as error:
        if error.errno != errno.EAGAIN:
            raise ServiceStartError(
                f"cannot use {path} ({error.strerror}): change --host {endpoint}"
            ) from None
    raise ServiceStartError(f"{endpoint} is in use: choose another --host, or stop what listens there")


log = get_logger(__name__)

SERVER_ARGUMENTS: tuple[tuple[str, int], ...] = (
    # Otherwise two servers can share a port, and each receives some of the calls.
    ("grpc.so_reuseport", 0),
    # Calls that arrived and are not yet accepted. With the defaults (1,000 and 3,000) many clients that connect at
    # once lose calls at random. Each costs a few KB while it waits.
    ("grpc.server.max_pending_requests", 100_000),
    ("grpc.server.max_pending_requests_hard_limit", 100_000),
    # Clients ping every 10 s (channel.CLIENT_ARGUMENTS); without these two the server would send them GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", int(SHORTEST_PING_INTERVAL * 1000)),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client that vanished silently is detected after 20 + 10 s, which frees its connection. Leases
    # detect it sooner and do not depend on this.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),  # as in channel.CLIENT_ARGUMENTS
    # A connection without calls is closed after this, in order: the client's next call connects again.
    ("grpc.max_connection_idle_ms", 300_000),
    # One that does not become a connection of gRPC, as of a port scan: gRPC's own limit is 120 s.
    ("grpc.server_handshake_timeout_ms", 30_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
)

# After the last call of our services, its status is still on its way to the socket, and only health watches and
# reflection streams stay open. They are cancelled after this many seconds.
_FLUSH = 0.5
# After its grace gRPC ends without waiting for calls; if it fails to, the process continues after this many seconds.
_OVERDUE = 5.0
_FOR_EVER = 1e9


@dataclass(frozen=True, slots=True)
class Registration:
    """One gRPC service of a server."""

    service_name: str
    """Full name in its .proto file, as in `rallypoint.timer.v1.TimerService`."""

    add: Callable[[grpc.aio.Server], None]
    """Adds the servicer: `functools.partial(add_TimerServiceServicer_to_server, servicer)`, for one."""

    on_drain: Callable[[], Awaitable[None]] | None = None
    """Called when the server begins to drain: make streams reconnect and end them. Limited by the grace."""

    message_rate: Rate | None = None
    """Messages that a client may send on one stream before it is ended with TOO_MANY_REQUESTS; None: unlimited."""

    rights: Rights = field(default_factory=dict)
    """The roles that may call each method, where a policy counts."""

    capabilities: Collection[Capability] = ()
    """Capabilities that the service gives the server."""

    limits: ServerLimits = field(default_factory=ServerLimits)
    """The limits of the service."""


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]
    """Health with List, which grpcio-health-checking 1.85 declares and does not serve; older ones do not declare it."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = tuple(names)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """Return the status of each service."""
        checks = {name: health_pb2.HealthCheckRequest(service=name) for name in self._names}
        return health_pb2.HealthListResponse(
            statuses={name: await self.Check(check, context) for name, check in checks.items()}
        )


class Server:
    """Serves a set of services, with ServerService, health, reflection, error mapping and a graceful end.

    Health (`grpc.health.v1`) reports SERVING for each service's full name once started and while it is ready, and for
    "" while all are; NOT_SERVING for all once draining. Belongs to one event loop; starts once.
    """

    def __init__(
        self,
        options: ServerOptions,
        *,
        services: Sequence[Registration],
        translate: Translate = lambda _error: None,
        ready: bool = True,
        instance: str = INSTANCE,
    ) -> None:
        """Create a server that does nothing until `start`.

        Args:
            options: the address to listen on, TLS, and the drain grace.
            services: the services.
            translate: returns the error for an exception of the services; None for those it does not know.
            ready: True if health reports SERVING from the start; False: only after `set_ready`.
            instance: random name; a replica over etcd has one of its own.
        """
        self._options = options
        self._info = describe_server(options, instance)
        add = partial(add_ServerServiceServicer_to_server, ServerServicer(self._info))
        self._given = tuple(services)
        self._services = (*services, Registration(SERVICE_NAME, add, rights={"GetServerInfo": EVERY_ROLE}))
        for each in self._services:
            self._info.services.append(each.service_name)
            self._info.capabilities.extend(each.capabilities)
            self._info.limits.MergeFrom(each.limits)
        self._info.capabilities.sort()
        self._ready = {**dict.fromkeys(self._info.services, ready), SERVICE_NAME: True}
        files = options.access
        self._calls = CallInterceptor(
            translate,
            request_rate=Rate(options.request_rate, options.request_burst) if options.request_rate else None,
            byte_rate=_byte_rate(options.request_byte_rate),
            message_rates={
                service.service_name: service.message_rate
                for service in self._services
                if service.message_rate is not None
            },
            most_watches=options.max_watches_per_client,
            access=Access(
                {service.service_name: service.rights for service in self._services},
                None if files.policy is None else Policy(files.policy),
                None if files.token_keys is None else TokenKeys(files.token_keys),
                Audit(files.audit_log),
                certificates=options.tls_client_ca is not None,
            ),
        )
        self._health = _HealthServicer(["", *self._ready])
        self._server: grpc.aio.Server | None = None
        self._endpoint: Endpoint | None = None
        self._draining: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Its address, as for `open_channel`: `host:port` with the real port, or `unix:/path`.

        Raises:
            RuntimeError: it was not started.
        """
        if self._endpoint is None:
            raise RuntimeError("the server was not started")
        return str(self._endpoint)

    async def start(self) -> None:
        """Listen and serve. If it fails, nothing is left open.

        Raises:
            ServiceStartError: the address is not available or must not be served in plaintext, or a TLS file is
                unusable. One line that names the change to make.
            RuntimeError: it was started before.
        """
        if self._server is not None:
            raise RuntimeError("the server was started before")
        try:
            endpoint = listening_endpoint(self._options.host, self._options.port)
            credentials = server_credentials(self._options, endpoint)
        except SettingError as error:
            raise ServiceStartError(str(error)) from None
        await check_free(endpoint)
        self._info.transport = transport(self._options, endpoint)
        set_seconds(self._info.started, time.time())
        _tune_interpreter()
        raise_open_files()
        filter_grpc_logs()
        most = ("grpc.max_allowed_incoming_connections", _most_connections())
        server = grpc.aio.server(interceptors=[self._calls], options=[*SERVER_ARGUMENTS, most])
        try:
            await self._register(server)
            port = await _bind(server, endpoint, credentials)
            await server.start()
        except BaseException:
            # A server that was never started does not release its resources when it is stopped.
            await server.start()
            await server.stop(None)
            raise
        self._server = server
        self._endpoint = endpoint if endpoint.path is not None else Endpoint(endpoint.host, port)
        names = ", ".join(name.rpartition(".")[2] for name in self._info.services)
        log.info(
            "ready",
            sentence=f"ready at {self.address} ({self._info.transport}), version {self._info.version}: {names}",
            services=[*self._info.services],
            address=self.address,
            transport=self._info.transport,
            version=self._info.version,
            protocol_version=self._info.protocol_version,
            instance=self._info.instance,
            capabilities=[*self._info.capabilities],
            limits=MessageToDict(self._info.limits, preserving_proto_field_name=True),
        )

    async def _register(self, server: grpc.aio.Server) -> None:
        for service in self._services:
            service.add(server)
        await self._publish_health()
        names = [*self._info.services]
        if self._options.health:
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
            names.append(health.SERVICE_NAME)
        if self._options.reflection:
            _enable_reflection([*names, reflection.SERVICE_NAME], server)

    async def set_ready(self, ready: bool, *services: Registration) -> None:
        """Report by health that services can do their work, or not: load balancers then send calls, or do not.

        Calls are accepted in either case; once the server drains, health always reports NOT_SERVING.

        Args:
            ready: True if they can.
            services: some of those given to this server; none: all of these.
        """
        for service in services or self._given:
            self._ready[service.service_name] = ready
        await self._publish_health()

    async def _publish_health(self) -> None:
        response = health_pb2.HealthCheckResponse
        for name in ("", *self._ready):
            ready = self._ready[name] if name else all(self._ready.values())
            await self._health.set(name, response.SERVING if ready else response.NOT_SERVING)

    async def serve_until_signal(
        self,
        before_drain: Callable[[], Awaitable[None]] | None = None,
        after_start: Callable[[], None] | None = None,
    ) -> None:
        """Start, if not started yet, and serve until SIGTERM or SIGINT; then drain. A second signal stops at once.

        Handles both signals from before it is ready, so that none kills a server that looks ready. Returns early when
        the server is drained or stopped by another task. If cancelled, it leaves the server running.

        Args:
            before_drain: awaited before the drain, while the server still accepts calls. No grace limits it; the
                second signal does.
            after_start: called as soon as the server listens, and `address` is known.

        Raises:
            ServiceStartError: see `start`.
        """
        with signalled((signal.SIGTERM, signal.SIGINT)) as received:
            if self._server is None:
                await self.start()
            if after_start is not None:
                after_start()
            ended = asyncio.create_task(self._ended())
            try:
                name = await _first(received, ended)
                if name is None:
                    # Raises the error of gRPC's own serving loop, if that is why it ended.
                    ended.result()
                    return
                log.info("signal received", signal=name)
                ending = asyncio.create_task(self._end(before_drain))
                if await _first(received, ending) is not None:
                    log.warning("second signal: stopping at once", open_calls=self._calls.open_calls)
                    await self.stop()
                    ending.cancel()
                await asyncio.wait({ending})
                if not ending.cancelled():
                    ending.result()
            finally:
                ended.cancel()

    async def _end(self, before_drain: Callable[[], Awaitable[None]] | None) -> None:
        if before_drain is not None:
            await before_drain()
        await self.drain()

    async def _ended(self) -> None:
        if self._server is not None:
            # Without a timeout, cancelling this wait would also cancel the server's own end.
            await self._server.wait_for_termination(timeout=_FOR_EVER)

    async def drain(self, grace: float | None = None) -> None:
        """End gracefully: health reports NOT_SERVING, new calls are refused, streams are informed, open calls end.

        Returns when the last call has ended and the port is free, at the latest some seconds after the grace.
        Calls still open after the grace are cancelled. A second call waits for the first one's end.

        Args:
            grace: seconds; None: the options' `drain_grace`.
        """
        if self._server is None:
            return
        if self._draining is None:
            seconds = self._options.drain_grace if grace is None else grace
            self._draining = asyncio.create_task(self._drain(self._server, seconds))
        await asyncio.wait({self._draining})
        if not self._draining.cancelled():
            self._draining.result()

    async def idle(self) -> None:
        """Wait until no call is open, except those of health and reflection."""
        await self._calls.idle()

    async def stop(self) -> None:
        """End at once: open calls are cancelled."""
        if self._server is None:
            return
        if self._draining is not None:
            self._draining.cancel()
        await self._close(self._server, None)

    async def _drain(self, server: grpc.aio.Server, grace: float) -> None:
        log.info("draining", grace=grace, open_calls=self._calls.open_calls)
        self._calls.refuse(
            ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "DRAINING",
                "this server is about to end: connect again, to another one if there is one",
                retry_after=1.0,
            )
        )
        try:
            async with asyncio.timeout(grace):
                drained = (service.on_drain for service in self._services if service.on_drain is not None)
                await asyncio.gather(
                    self._health.enter_graceful_shutdown(), *(_call_on_drain(each) for each in drained)
                )
                await self._calls.idle()
        except TimeoutError:
            log.warning("grace is over, cancelling open calls", open_calls=self._calls.open_calls)
        await self._close(server, _FLUSH)
        log.info("stopped")

    async def _close(self, server: grpc.aio.Server, grace: float | None) -> None:
        closing = asyncio.create_task(server.stop(grace))
        _, open_still = await asyncio.wait({closing}, timeout=_OVERDUE + (grace or 0))
        if open_still:
            log.error("gRPC does not stop; continuing without it", open_calls=self._calls.open_calls)


_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


def _byte_rate(per_second: int) -> Rate | None:
    """Return the rate for the bytes of requests: half a second's at once, and a request of any size; None: any rate."""
    return Rate(per_second, max(per_second // 2, MAX_MESSAGE_BYTES)) if per_second else None


def _enable_reflection(names: Sequence[str], server: grpc.aio.Server) -> None:
    """Serve reflection v1alpha, which is all that grpcio-reflection has, and v1: their messages are the same.

    v1 is not in `names`: there is no description of it, and tools that list all methods would fail for want of one.
    """
    pool = _described(names)
    reflection.enable_server_reflection(names, server, pool)
    handler = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names, pool).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_REFLECTION_V1, methods),))


def _described(names: Sequence[str]) -> DescriptorPool:
    """Return a pool with the files of services, and of the details of their errors, and with the fields' JSON names.

    The default pool has the files of every generated module that is loaded, those of a journal and of etcd too, and no
    JSON names: grpcurl then writes `run_id`, where it otherwise writes `runId`, as buf does.
    """
    pool, added = DescriptorPool(), set[str]()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            described = FileDescriptorProto.FromString(file.serialized_pb)
            for message in described.message_type:
                _set_json_names(message, file.message_types_by_name[message.name])
            pool.Add(described)

    add(error_details_pb2.DESCRIPTOR)
    for name in names:
        with suppress(KeyError):  # a service without a description is listed only
            add(descriptor_pool.Default().FindFileContainingSymbol(name))
    return pool


def _set_json_names(message: DescriptorProto, descriptor: Descriptor) -> None:
    for each in message.field:
        each.json_name = descriptor.fields_by_name[each.name].json_name
    for nested in message.nested_type:
        _set_json_names(nested, descriptor.nested_types_by_name[nested.name])


def _tune_interpreter() -> None:
    """Configure Python for a server: many objects that stay, and threads that wait for one another.

    The garbage collector examines every object after a number of new ones, and a thousand streams that open at once are
    a hundred thousand objects that stay: a tenth of the time was spent examining them again and again. An object
    without references is freed at once in any case; only cycles wait longer. But nothing else runs while it examines
    objects: 10,000 new ones take some 10 ms, and 50,000 that have stayed once some 40 ms. With a million of these, a
    client that opened 10,000 runs delayed heartbeats by 0.4 s.

    A thread that wants to run waits for a busy one for up to the switch interval. SQLite's thread releases the lock
    several times a statement: with Python's 5 ms a journal beside a busy event loop takes ten times as long to commit.
    """
    gc.freeze()
    gc.set_threshold(10_000, 5, 400)
    sys.setswitchinterval(0.0005)
    _give_back_large_blocks()


# Of mallopt(3) in glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def _give_back_large_blocks() -> None:
    """Have freed values of a store given back to the system, where the C library is glibc.

    Once glibc has freed a value of 1 MiB, it puts those that follow between small blocks, and keeps their memory for
    ever: 588 of 630 MiB of a service of which all runs had been deleted. A fixed threshold turns that off.
    """
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 256 * 1024)
        libc.mallopt(_M_TRIM_THRESHOLD, 1024 * 1024)


# Each connection takes a file, and so does each log that is read: fewer files than this may be too few for a job of a
# thousand hosts. A comparison with the limits of nodes and streams would warn almost everywhere, since they allow far
# more than most services ever have.
_ENOUGH_FILES = 4096
# Some container runtimes give a hard limit of a billion, at which programs that loop over all descriptors hang.
_MOST_FILES = 1 << 20


# Files for all but connections: the journal, and pipes and logs of an agent's workers.
_OTHER_FILES = 0.1  # of all


def _most_connections() -> int:
    """Return the connections that a listener takes at a time: without a bound they use the last file of the process."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return int(
        (min(files, _MOST_FILES) if files != resource.RLIM_INFINITY else _MOST_FILES) * (1 - _OTHER_FILES)
    )


@cache
def raise_open_files() -> None:
    """Raise this process's soft limit of open files to the hard one (or 2**20); warn if that is low. Once per process.

    Many systems start processes with 1,024, for programs that use select(). The workers of an agent may be such
    programs: they get the limit with which the agent was started (rallypoint.agent.spawner.protocol).
    """
    current, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    with suppress(OSError, ValueError):  # a limit above fs.nr_open can't be reached
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, current), hard))
    if hard != resource.RLIM_INFINITY and hard < _ENOUGH_FILES:
        log.warning(
            "few files may be open, and each connection takes one: raise the limit (ulimit -n; LimitNOFILE= of a "
            "systemd unit; docker run --ulimit nofile=)",
            limit=hard,
            enough=_ENOUGH_FILES,
        )


async def _call_on_drain(on_drain: Callable[[], Awaitable[None]]) -> None:
    try:
        await on_drain()
    except Exception:
        log.exception("a service failed to drain")


async def _first(received: asyncio.Queue[signal.Signals], other: asyncio.Task[None]) -> str | None:
    """Return the next signal's name, or None if `other` ended before one came."""
    waiting = asyncio.create_task(received.get())
    try:
        await asyncio.wait({waiting, other}, return_when=asyncio.FIRST_COMPLETED)
        return waiting.result().name if waiting.done() else None
    finally:
        waiting.cancel()


# Each fails only if another program tries the address in the same few microseconds.
_BIND_ATTEMPTS = 5


async def _bind(
    server: grpc.aio.Server, endpoint: Endpoint, credentials: grpc.ServerCredentials | None
) -> int:
    for _ in range(_BIND_ATTEMPTS):
        try:
            if credentials is None:
                return server.add_insecure_port(str(endpoint))
            return server.add_secure_port(str(endpoint), credentials)
        except RuntimeError:
            # Another program may have taken it since it was found free, as of two agents that start at once; or it only
            # tried it, as `check_free` does.
            await check_free(endpoint)
    raise ServiceStartError(f"cannot listen on {endpoint}: change --host or --port")
