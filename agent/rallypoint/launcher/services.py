"""How an agent listens that serves its job's rendezvous, alone or as one of several."""

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
"""Seconds that the other nodes get to hear how the run ended. They hear of it at once; longer is for a busy machine."""

_log = get_logger("rallypoint.run")


def listening(place: Endpoint, tls: ClientTLS | None) -> ServerOptions:
    """The options of a server that others reach at a place.

    Args:
        place: Where; port 0 for any.
        tls: Certificates of the server, which asks clients for theirs; None: plaintext, as with torchrun.

    Raises:
        SettingError: There is no certificate to serve with; one line.
    """
    if tls is not None and (tls.certificate is None or tls.key is None):
        raise SettingError(
            f"rendezvous is to be served here, at {place.host}, with TLS: give --tls-cert and --tls-key beside --tls-ca"
        )
    # A name may be of an address that only this machine can reach, as Debian has it in /etc/hosts.
    everywhere = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 (as torch's store listens)
    return ServerOptions(
        host=place.host if place.loopback else everywhere,
        port=place.port,
        tls_cert=tls.certificate if tls is not None else None,
        tls_key=tls.key if tls is not None else None,
        tls_client_ca=tls.ca if tls is not None else None,
        insecure=tls is None,
    )


def warn_of_plaintext(place: Endpoint, tls: ClientTLS | None) -> None:
    """Say so where rendezvous is served to other machines in plaintext."""
    if tls is None and not place.loopback:
        _log.warning(
            "rendezvous is served in plaintext: whoever reaches the port can steer the job",
            address=place.host,
            advice="--tls-ca, --tls-cert and --tls-key on all hosts",
        )


# ---- Services inside the process of an agent, for jobs that name none.


@asynccontextmanager
async def embedded_rendezvous() -> AsyncIterator[str]:
    """A rendezvous service inside this process, for as long as the context lasts; yields its endpoint."""
    async with rendezvous_server(ServerOptions()) as server:
        yield server.address


@asynccontextmanager
async def rendezvous_server(options: ServerOptions) -> AsyncIterator[Server]:
    """A server of a rendezvous service that forgets its runs at the end; started, and stopped with the context.

    Raises:
        ServiceStartError: It can't listen as it should.
    """
    async with AsyncExitStack() as stack:
        services = await stack.enter_async_context(rendezvous_services(MemoryJournal()))
        server = Server(options, services=services, translate=translate_rendezvous)
        await server.start()
        stack.push_async_callback(server.stop)
        yield server


@asynccontextmanager
async def embedded_timer() -> AsyncIterator[str]:
    """A timer service inside this process, for as long as the context lasts; yields its endpoint."""
    server = Server(ServerOptions(), services=[timer_registration()], translate=translate_timer)
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()
