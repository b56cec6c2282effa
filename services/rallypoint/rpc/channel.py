"""Channels of a client to any service of Rallypoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Self

import grpc

from rallypoint.rpc.endpoint import ClientSecurity, Endpoint, parse_endpoint
from rallypoint.rpc.tls import ClientCredentials

MAX_MESSAGE_BYTES = 4 * 1024 * 1024
"""Limit for one message, in either direction: gRPC's default, so that generated clients in any language agree."""

CLIENT_ARGUMENTS: tuple[tuple[str, int], ...] = (
    # A server that vanished silently (power, network) is detected after 10 + 5 s without a byte from it. Shorter
    # detects it sooner, but drops connections to a machine that was only busy. The server permits a ping every
    # 5 s (server.SERVER_ARGUMENTS), half of this.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The real timeout for the reply to a ping in gRPC 1.85: 60 s, regardless of the settings above, unless set here.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A client reconnects to a restarted server within 1 s, at the price of one attempt a second per client while the
    # server is down. gRPC adds 20 % of jitter. `min` is the timeout of one attempt (for a host that drops packets).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # The name may resolve to another address after a restart; gRPC would wait 30 s before it resolves again.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Limits the bytes that the server must queue for a client that stops reading: about the look-ahead, instead of 4 to
    # 7 MiB with bandwidth probing. At 16 KiB a message of 4 MiB takes up to half as long again; above 64 KiB none is
    # faster.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # With retries, gRPC repeats a call on a connection that is just being closed (by a server that was paused or cut
    # off, for example) on the same connection without a pause, at 150 MB/s; past 1 GiB, gRPC 1.85 ends the process with
    # the next call. All our clients retry themselves, with a pause.
    ("grpc.enable_retries", 0),
    # One channel, one connection: two channels of a process to the same address would share one, and fail together.
    ("grpc.use_local_subchannel_pool", 1),
    # Services of a job are peers on its network; a web proxy (http_proxy) would intercept the traffic.
    ("grpc.enable_http_proxy", 0),
)


# Seconds that calls may still wait for a connection in a channel whose TLS files were replaced.
_WAITING_CALLS = 15.0


def open_channel(endpoint: str, security: ClientSecurity = None) -> grpc.aio.Channel:
    """Open a channel. It connects when first used and reconnects automatically; close it when done.

    Args:
        endpoint: `host:port`, `[ipv6]:port` or `unix:/path`.
        security: how the connection is secured. With TLS files, the host must be in the server's certificate.

    Raises:
        EndpointError: `endpoint` is none of these.
        TLSFileError: a TLS file is missing, unusable or does not match.
        SettingError: the connection would be plaintext over a network, and that was not chosen.
    """
    return channel_at(parse_endpoint(endpoint), ClientCredentials(security))


def channel_at(
    endpoint: Endpoint, credentials: ClientCredentials, name: str | None = None
) -> grpc.aio.Channel:
    """Open a channel, as `open_channel`.

    Args:
        name: the host name that resolved to `endpoint`, which must be in the server's certificate; None: the host of
            `endpoint`.
    """
    open_ = partial(_channel, endpoint, credentials, name)
    return _RenewedChannel(open_, credentials.refresh) if credentials.of_files else open_()


def _channel(endpoint: Endpoint, credentials: ClientCredentials, name: str | None) -> grpc.aio.Channel:
    options: list[tuple[str, int | str]] = [*CLIENT_ARGUMENTS]
    channel_credentials, certified_name = credentials.of(endpoint)
    if certified_name is not None:
        options.append(("grpc.ssl_target_name_override", certified_name))
    elif name is not None:
        # gRPC also takes the host name that TLS checks from this option.
        options.append(("grpc.default_authority", str(Endpoint(name, endpoint.port))))
    if channel_credentials is None:
        return grpc.aio.insecure_channel(endpoint.target, options=options)
    return grpc.aio.secure_channel(endpoint.target, channel_credentials, options=options)


class _RenewedChannel(grpc.aio.Channel):
    """A channel over TLS files, which counts on their present content whenever it has to connect.

    gRPC's own channel keeps the content that it began with: once that has expired, it can't connect any more. A channel
    that stands is not touched.
    """

    def __init__(self, open_: Callable[[], grpc.aio.Channel], refresh: Callable[[], int]) -> None:
        """Open the first one; `refresh` returns a number that changes with the files."""
        self._open = open_
        self._refresh = refresh
        self._read = refresh()
        self._channel = open_()
        self._closing: set[asyncio.Task[None]] = set()

    def _current(self) -> grpc.aio.Channel:
        connected = self._channel.get_state() is grpc.ChannelConnectivity.READY
        if not connected and (read := self._refresh()) != self._read:
            self._read = read
            # It would go on trying to connect; but calls may still wait in it.
            closing = asyncio.create_task(self._channel.close(_WAITING_CALLS))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self._channel = self._open()
        return self._channel

    def _method(self, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        made: tuple[grpc.aio.Channel | None, Any] = None, None

        def call(*request: Any, **options: Any) -> Any:
            nonlocal made
            channel = self._current()
            if channel is not made[0]:
                made = channel, getattr(channel, kind)(*arguments, **named)
            return made[1](*request, **options)

        return call

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """As `grpc.aio.Channel`; so are the others."""
        return self._method("unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._method("unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._method("stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._method("stream_stream", arguments, named)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel_ready()

    async def close(self, grace: float | None = None) -> None:
        for each in self._closing:
            each.cancel()
        await asyncio.gather(self._channel.close(grace), *self._closing, return_exceptions=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()
