"""Servers inside an agent: options of a server for other hosts, and embedded services."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rallypoint.rendezvous.api.errors import translate as translate_rendezvous
from rallypoint.rendezvous.api.service import rendezvous_services
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rpc.endpoint import ClientTLS, Endpoint, ServerOptions, SettingError
from rallypoint.rpc.logs import get_logger
from rallypoint.serving.server import Server
from rallypoint.timer.server.service import timer_registration
from rallypoint.timer.server.service import translate as translate_timer

LAST_WORD = 10.0
"""Seconds for the other nodes to learn the run's end. They learn it at once; the rest is for a busy machine."""

_log = get_logger("rallypoint.run")


def listening(endpoint: Endpoint, tls: ClientTLS | None) -> ServerOptions:
    """Return the options of a server that other hosts reach at an endpoint.

    Args:
        endpoint: The endpoint; port 0: any free port.
        tls: Certificates of the server, which requires client certificates; None: plaintext, as with torchrun.

    Raises:
        SettingError: The certificate or its key is missing; one line.
    """
    if tls is not None and (tls.certificate is None or tls.key is None):
        raise SettingError(
            f"this host serves rendezvous at {endpoint.host} with TLS: give --tls-cert and --tls-key beside --tls-ca"
        )
    # A name may resolve to an address that only this machine can reach, as in Debian's /etc/hosts.
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 (as torch's store listens)
    return ServerOptions(
        host=endpoint.host if endpoint.loopback else everywhere,
        port=endpoint.port,
        tls_cert=tls.certificate if tls is not None else None,
        tls_key=tls.key if tls is not None else None,
        tls_client_ca=tls.ca if tls is not None else None,
        insecure=tls is None,
    )


def warn_of_plaintext(endpoint: Endpoint, tls: ClientTLS | None) -> None:
    """Log a warning if rendezvous is served to other machines in plaintext."""
    if tls is None and not endpoint.loopback:
        _log.warning(
            "rendezvous is served in plaintext: every client that reaches the port can control the job",
            address=endpoint.host,
            advice="--tls-ca, --tls-cert and --tls-key on all hosts",
        )


# ---- Services inside an agent's process, for jobs that name none.


@asynccontextmanager
async def embedded_rendezvous() -> AsyncIterator[str]:
    """Serve rendezvous inside this process as long as the context lasts; yield the endpoint."""
    async with rendezvous_server(ServerOptions()) as server:
        yield server.address


@asynccontextmanager
async def rendezvous_server(options: ServerOptions) -> AsyncIterator[Server]:
    """Serve rendezvous as long as the context lasts, in memory only; yield the started server.

    Raises:
        ServiceStartError: The server can't listen.
    """
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(rendezvous_services(MemoryJournal()))
        server = Server(options, services=services, translate=translate_rendezvous)
        await server.start()
        stack.push_async_callback(server.stop)
        yield server


@asynccontextmanager
async def embedded_timer() -> AsyncIterator[str]:
    """Serve timers inside this process as long as the context lasts; yield the endpoint."""
    server = Server(ServerOptions(), services=[timer_registration()], translate=translate_timer)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
