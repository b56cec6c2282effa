"""A client's connections to a service of several replicas: one channel for each replica in use, and the choice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Self, TypeAlias, TypeVar, cast

import grpc
import grpc.aio

from rallypoint.rpc.address import Address, Resolve, addresses_of, has_name, listed_addresses
from rallypoint.rpc.channel import channel_at
from rallypoint.rpc.endpoint import ClientSecurity, Endpoints, SettingError, parse_endpoint, parse_endpoints
from rallypoint.rpc.errors import GONE, MOVED, ServiceError
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.selector import CONNECT_TIMEOUT, REPLY_TIMEOUT, ReplicaSearch, ReplicaSelector
from rallypoint.rpc.tls import ClientCredentials

IDLE_TIMEOUT = 60.0
"""Seconds after which an idle channel is closed, unless it leads to the next replica to call. A replica that goes and
comes back is reached on the same connection; longer keeps one open per client and replica without need."""

# Seconds between two look-ups of names, as in channel.CLIENT_ARGUMENTS.
_RESOLVE_INTERVAL = 2.0

_Stub = TypeVar("_Stub")


class _CachedChannel:
    """A channel to one address, and the stubs made for it."""

    __slots__ = ("address", "channel", "stubs", "used_at", "users")

    def __init__(self, address: Address | None, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.stubs: dict[Callable[[grpc.aio.Channel], Any], Any] = {}
        self.users = 0
        self.used_at = 0.0


class ReplicaConnection:
    """The connection of one attempt to one replica. Report the result, then hang up.

    Attributes:
        alone: True if there is no other replica: then all the client can do is wait.
        waits: True if a call may wait in the channel for as long as it takes to connect: `alone`, and the channel does
            not follow TLS files (then each attempt of the client reads them, if they were replaced).
        timeout: Seconds to wait for a reply that should come at once; infinite if `alone`.
    """

    __slots__ = ("_client", "_connection", "_hung_up", "_search", "alone", "timeout", "waits")

    def __init__(
        self,
        client: ReplicaClient,
        search: ReplicaSearch,
        cached: _CachedChannel,
        timeout: float,
        *,
        alone: bool,
    ) -> None:
        self._client = client
        self._search = search
        self._connection = cached
        self.timeout = timeout
        self.alone = alone
        self.waits = alone and not client.follows_files
        self._hung_up: Callable[[], object] = lambda: None
        cached.users += 1

    @property
    def address(self) -> str:
        """The address of the replica, for messages."""
        return str(self._connection.address or self._client)

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub]) -> _Stub:
        """Return the stub of a service on this connection."""
        stubs = self._connection.stubs
        if (made := stubs.get(kind)) is None:
            made = stubs[kind] = kind(self._connection.channel)
        return cast(_Stub, made)

    def answered(self) -> None:
        """Report a successful call."""
        if self._connection.address is not None:
            self._search.answered(self._connection.address)

    def failed(self, error: ServiceError) -> None:
        """Report that it failed; the selector chooses the next replica from it."""
        if self._connection.address is not None:
            self._client.learn(self._search, self._connection.address, error)

    def when_moved(self, callback: Callable[[Address], None]) -> None:
        """Call `callback` when another call finds that another replica is the owner, until `hang_up`."""
        here = self._connection.address

        def found(owner: Address) -> None:
            if here is not None and owner != here:
                callback(owner)

        self._hung_up = self._search.selector.when_found(found)

    def hang_up(self) -> None:
        """End the use of the connection."""
        self._hung_up()
        self._client.release(self._connection)


class ReplicaClient:
    """Connects to the replicas of a service. Belongs to one event loop; close it when done.

    Channels are opened when first needed, one per address. With one address it behaves like a channel.
    """

    def __init__(
        self,
        endpoints: Endpoints | str,
        security: ClientSecurity = None,
        *,
        pace: Pace | None = None,
        resolve: Resolve = addresses_of,
    ) -> None:
        """Set up; nothing is opened yet.

        Args:
            endpoints: The service's endpoints; text as for parse_endpoints.
            security: How connections to all replicas are secured.
            pace: Clock, sleep and randomness, which spreads clients over the replicas.
            resolve: Resolves names.

        Raises:
            EndpointError: The endpoints are not valid.
            TLSFileError: A TLS file is missing, unusable or does not match.
            SettingError: A connection would be plaintext over a network, and that was not chosen.
        """
        self._endpoints = parse_endpoints(endpoints) if isinstance(endpoints, str) else endpoints
        self._text = str(self._endpoints)
        self._credentials = ClientCredentials(security)
        for each in self._endpoints.endpoints:
            self._credentials.of(each)
        self._pace = pace or Pace()
        self._resolve = resolve
        self._named = any(map(has_name, self._endpoints.endpoints))
        self._selector = ReplicaSelector(
            [Address.of(each) for each in self._endpoints.endpoints], self._pace.draw
        )
        self._connections: dict[Address, _CachedChannel] = {}
        self._fixed: _CachedChannel | None = None
        self._resolving: asyncio.Task[None] | None = None
        self._resolved_at: float | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    @classmethod
    def over(cls, channel: grpc.aio.Channel) -> Self:
        """Return a client that makes every call over one channel, and does not close the channel."""
        client = cls("unix:/")
        client._fixed = _CachedChannel(None, channel)
        return client

    def __str__(self) -> str:
        return self._text

    @property
    def follows_files(self) -> bool:
        """Whether channels are secured by TLS files, which may be replaced."""
        return self._credentials.of_files

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all channels; calls in progress are cancelled."""
        if self._sweep is not None:
            self._sweep.cancel()
        if self._resolving is not None:
            self._resolving.cancel()
        connections = [*self._connections.values()]
        self._connections.clear()
        await asyncio.gather(
            *(each.channel.close() for each in connections), *self._closing, return_exceptions=True
        )

    def search(self) -> ReplicaSearch:
        """Begin a search for a replica that replies: for one call, or for a series of streams."""
        return ReplicaSearch(self._selector)

    async def connect(self, search: ReplicaSearch, within: float = float("inf")) -> ReplicaConnection:
        """Return a connection to the next replica to call; it is connected if there are other replicas.

        Args:
            search: The attempts so far; a failure to connect is recorded in it.
            within: Limit in seconds.

        Raises:
            ServiceError: UNAVAILABLE, NO_CONNECTION: the replica did not connect in time; nothing was sent to it.
        """
        if self._fixed is not None:
            return ReplicaConnection(self, search, self._fixed, float("inf"), alone=True)
        if self._named and self._resolved_at is None:
            await self._look_up(within)
        address = search.next(self._pace.clock())
        cached = self._connections.get(address)
        if cached is None:
            cached = self._connections[address] = _CachedChannel(address, self._open(address))
        alone = len(self._selector.ordered) <= 1
        connection = ReplicaConnection(
            self, search, cached, self._selector.timeout(address, REPLY_TIMEOUT), alone=alone
        )
        if alone:
            return connection
        timeout = self._selector.timeout(address, CONNECT_TIMEOUT)
        try:
            await _connected(cached.channel, min(timeout, within))
        except TimeoutError:
            message = f"{address} accepted no connection within {timeout:g} s"
            error = ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_CONNECTION", message)
            if within >= timeout:  # a shorter limit proves nothing: do not mark the replica for it
                connection.failed(error)
            connection.hang_up()
            raise error from None
        except BaseException:
            connection.hang_up()
            raise
        return connection

    def rest(self, search: ReplicaSearch) -> None:
        """Prepare a pause of a search that found no replica: names are resolved again, in the background."""
        search.rest()
        if (
            self._named
            and self._fixed is None
            and (self._resolved_at is None or self._pace.clock() >= self._resolved_at + _RESOLVE_INTERVAL)
        ):
            self._begin_to_look_up()

    def learn(self, search: ReplicaSearch, address: Address, error: ServiceError) -> None:
        """Record a failed call in the search and the selector."""
        now = self._pace.clock()
        if error.reason in MOVED:
            search.pointed(address, self._named_owner(error.metadata.get("owner_address", "")), now)
        elif error.reason in ("NO_CONNECTION", "NO_ANSWER", grpc.StatusCode.DEADLINE_EXCEEDED.name):
            search.refused(address, now, silent=True)
        elif error.code in GONE and error.reason not in ("SUBSCRIBER_TOO_SLOW", "FIRST_MESSAGE_LATE"):
            search.refused(address, now)
        else:
            search.declined(address)

    def release(self, cached: _CachedChannel) -> None:
        """Count down the users of a connection."""
        cached.users -= 1
        cached.used_at = time.monotonic()
        if cached.users == 0 and self._sweep is None and len(self._connections) > 1:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_TIMEOUT, self._close_idle)

    def _named_owner(self, address: str) -> Address | None:
        if not address:
            return None
        try:
            owner = parse_endpoint(address)
            self._credentials.of(owner)
        except SettingError:
            return None  # unusable for this client
        return self._selector.known_as(Address.of(owner))

    def _open(self, address: Address) -> grpc.aio.Channel:
        name = address.listed.host if address.listed != address.endpoint else None
        return channel_at(address.endpoint, self._credentials, name)

    async def _look_up(self, within: float) -> None:
        looking = self._begin_to_look_up()
        # Shared by all calls that wait for it: one that is cancelled must not end it for the others.
        await asyncio.wait({looking}, timeout=None if within == float("inf") else within)

    def _begin_to_look_up(self) -> asyncio.Task[None]:
        if self._resolving is None:
            self._resolving = asyncio.create_task(self._renew())
        return self._resolving

    async def _renew(self) -> None:
        try:
            self._selector.renew(await listed_addresses(self._endpoints, self._resolve))
        finally:
            self._resolved_at = self._pace.clock()
            self._resolving = None

    def _close_idle(self) -> None:
        """Close channels that were idle for long."""
        self._sweep = None
        now = time.monotonic()
        for address, cached in [*self._connections.items()]:
            if cached.users or address in (self._selector.owner, self._selector.good):
                continue
            if now < cached.used_at + IDLE_TIMEOUT / 2:
                self._sweep = self._sweep or asyncio.get_running_loop().call_later(
                    IDLE_TIMEOUT, self._close_idle
                )
                continue
            del self._connections[address]
            task = asyncio.create_task(cached.channel.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


Where: TypeAlias = "ReplicaClient | grpc.aio.Channel"
"""A client's service: its replicas, or one server over a channel that the client does not close."""


def replica_client(where: Where) -> ReplicaClient:
    """Return a replica client for a service; one for a single channel if a channel is given."""
    return where if isinstance(where, ReplicaClient) else ReplicaClient.over(where)


async def _connected(channel: grpc.aio.Channel, timeout: float) -> None:
    """Wait until a channel is connected, or has failed to connect: then the next call fails at once, with the reason.

    Raises:
        TimeoutError: Neither happened in time.
    """
    state = channel.get_state(try_to_connect=True)
    if state not in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
        return
    async with asyncio.timeout(timeout):
        while state in (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING):
            await channel.wait_for_state_change(state)
            state = channel.get_state(try_to_connect=True)
