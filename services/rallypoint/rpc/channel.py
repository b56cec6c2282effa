"""How a client of any service of Rallypoint connects."""

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
"""Of one message, either way: gRPC's own default, so that generated clients in any language agree with it."""

CLIENT_ARGUMENTS: tuple[tuple[str, int], ...] = (
    # A server that vanished without a word (power, network) is noticed after 10 + 5 s without a byte from it.
    # Shorter finds out sooner and drops connections that a busy machine was merely slow on. The server permits
    # a ping every 5 s (server.SERVER_ARGUMENTS), half of this.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What gRPC 1.85 really waits for the answer to a ping: it takes 60 s, whatever stands above, unless told here.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted server is found again within 1 s, at the price of an attempt every second per client while it is
    # gone. gRPC adds 20 % of jitter. `min` is how long one attempt may take (a host that swallows packets).
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # The name may point to another address after a restart; gRPC would wait 30 s before it asks again.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # What a client that stops reading makes its server queue: about the look-ahead, instead of 4 to 7 MiB with
    # bandwidth probing. At 16 KiB a message of 4 MiB takes up to half as long again; past 64 KiB none is faster.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_536),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A call on a connection that says goodbye as it is made (to a server that was paused or cut off, say) would be
    # tried again on it without a pause, at 150 MB/s; past 1 GiB, gRPC 1.85 ends the process with the next call. All
    # our clients try again by themselves, with a pause.
    ("grpc.enable_retries", 0),
    # One channel, one connection: two channels of a process to the same place would share one, and its fate.
    ("grpc.use_local_subchannel_pool", 1),
    # Services of a job are peers on its network; an http_proxy meant for the web would swallow the traffic.
    ("grpc.enable_http_proxy", 0),
)


def open_channel(endpoint: str, tls: ClientTLS | None = None) -> grpc.aio.Channel:
    """Opens a channel. It connects when first used and connects again by itself; close it when done.

    Args:
        endpoint: `host:port`, `[ipv6]:port` or `unix:/path`.
        tls: the files to speak TLS with; None for plaintext. The host must be in the server's certificate.

    Raises:
        EndpointError: `endpoint` is none of these.
        TLSFileError: a TLS file is missing, unusable or does not match.
    """
    return channel_at(parse_endpoint(endpoint), credentials_of(tls))


def credentials_of(tls: ClientTLS | None) -> grpc.ChannelCredentials | None:
    """What to connect with; None for plaintext.

    Raises:
        TLSFileError: a TLS file is missing, unusable or does not match.
    """
    return client_credentials(tls) if tls is not None else None


def channel_at(
    place: Endpoint, credentials: grpc.ChannelCredentials | None, name: str | None = None
) -> grpc.aio.Channel:
    """Opens a channel, as `open_channel`.

    Args:
        place: where to.
        credentials: what to connect with; None for plaintext.
        name: the host name that `place` is an address of, which the server's certificate must have; None: `place` has
            it itself.
    """
    options: list[tuple[str, int | str]] = [*CLIENT_ARGUMENTS]
    if name is not None:
        # TLS takes the name that it asks for from this, too.
        options.append(("grpc.default_authority", str(Endpoint(name, place.port))))
    if credentials is None:
        return grpc.aio.insecure_channel(place.target, options=options)
    return grpc.aio.secure_channel(place.target, credentials, options=options)
