"""Channels of a client to any service of Rallypoint."""

from __future__ import annotations

import grpc

from rallypoint.rpc.endpoint import ClientTLS, Endpoint, EndpointError, parse_endpoint
from rallypoint.rpc.tls import TLSFileError, client_credentials

__all__ = [
    "CLIENT_ARGUMENTS",
    "MAX_MESSAGE_BYTES",
    "ClientTLS",
    "EndpointError",
    "TLSFileError",
    "channel_at",
    "credentials_of",
    "open_channel",
]

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


def open_channel(endpoint: str, tls: ClientTLS | None = None) -> grpc.aio.Channel:
    """Open a channel. It connects when first used and reconnects automatically; close it when done.

    Args:
        endpoint: `host:port`, `[ipv6]:port` or `unix:/path`.
        tls: the client's TLS files; None for plaintext. The host must be in the server's certificate.

    Raises:
        EndpointError: `endpoint` is none of these.
        TLSFileError: a TLS file is missing, unusable or does not match.
    """
    return channel_at(parse_endpoint(endpoint), credentials_of(tls))


def credentials_of(tls: ClientTLS | None) -> grpc.ChannelCredentials | None:
    """Return the credentials of a client; None for plaintext.

    Raises:
        TLSFileError: a TLS file is missing, unusable or does not match.
    """
    return client_credentials(tls) if tls is not None else None


def channel_at(
    endpoint: Endpoint, credentials: grpc.ChannelCredentials | None, name: str | None = None
) -> grpc.aio.Channel:
    """Open a channel, as `open_channel`.

    Args:
        endpoint: the endpoint to connect to.
        credentials: the client's credentials; None for plaintext.
        name: the host name that resolved to `endpoint`, which must be in the server's certificate; None: the host of
            `endpoint`.
    """
    options: list[tuple[str, int | str]] = [*CLIENT_ARGUMENTS]
    if name is not None:
        # gRPC also takes the host name that TLS checks from this option.
        options.append(("grpc.default_authority", str(Endpoint(name, endpoint.port))))
    if credentials is None:
        return grpc.aio.insecure_channel(endpoint.target, options=options)
    return grpc.aio.secure_channel(endpoint.target, credentials, options=options)
