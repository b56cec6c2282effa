"""Servers inside an agent: options of a server for other hosts, and embedded services."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace

from rallypoint.rendezvous.api.errors import translate as translate_rendezvous
from rallypoint.rendezvous.api.service import own_shard, registrations
from rallypoint.rendezvous.journal.journal import MemoryJournal
from rallypoint.rendezvous.runs.engine import RendezvousEngine
from rallypoint.rendezvous.shard.locator import SingleShardLocator
from rallypoint.rendezvous.shard.shard import Shard
from rallypoint.rpc.endpoint import (
    AccessFiles,
    ClientSecurity,
    ClientTLS,
    Endpoint,
    Plaintext,
    RunSecret,
    ServerOptions,
    SettingError,
)
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.runtime_folder import new_run_socket
from rallypoint.serving.server import Server
from rallypoint.timer.server.service import timer_registration
from rallypoint.timer.server.service import translate as translate_timer

LAST_WORD = 10.0
"""Seconds for the other nodes to learn the run's end. They learn it at once; the rest is for a busy machine."""


async def calls_to_end(server: Server) -> None:
    """Wait until no call of a server is open, at most for LAST_WORD: the end of a job ends those that follow it."""
    with suppress(TimeoutError):
        await asyncio.wait_for(server.idle(), LAST_WORD)


def listening(host: str, port: int, security: ClientSecurity, access: AccessFiles) -> ServerOptions:
    """Return the options of a server of a job at an address, which is secured as the job's own connections are.

    Args:
        host: Name or address to listen on, or `unix:/path`.
        port: The port; 0: any free one.
        security: With TLS files, clients need a certificate of the same authority.
        access: Which calls are refused, and recorded. None is refused at a Unix socket.

    Raises:
        SettingError: One of the TLS files is missing; one line.
    """
    if host.startswith("unix:"):
        recorded = AccessFiles(audit_log=access.audit_log)
        return ServerOptions(host=host, access=recorded)  # the kernel decides who gets in
    match security:
        case ClientTLS(ca, certificate, key):
            if ca is None or certificate is None or key is None:
                raise SettingError(
                    f"this host serves at {host} with TLS, to clients of one authority: give --tls-cert and --tls-key "
                    "beside --tls-ca"
                )
            options = ServerOptions(tls_cert=certificate, tls_key=key, tls_client_ca=ca)
        case RunSecret():
            options = ServerOptions(run_secret=security)
        case _:
            options = ServerOptions(insecure=isinstance(security, Plaintext))
    return replace(options, host=host, port=port, access=access)


async def listening_host(endpoint: Endpoint) -> str:
    """Return the address at which this host listens to serve an endpoint: the endpoint's own if other hosts reach it.

    A name may resolve to an address that only this host can reach, as in Debian's /etc/hosts, or to one that forwards
    to this host: then it listens at all addresses.
    """
    if endpoint.loopback:
        return endpoint.host
    own = await own_addresses(endpoint.host)
    if own and not any(ipaddress.ip_address(address).is_loopback for address in own):
        return endpoint.host
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"  # noqa: S104 (see above)


async def own_addresses(host: str) -> list[str]:
    """Return the addresses of a name at which this machine can listen."""
    found = await _addresses(host)
    return [str(address[0]) for family, _, _, _, address in found if _can_bind(family, address)]


async def resolves(host: str) -> bool:
    """Return True if a name has an address, or is one. A pod's own name has none at first."""
    return bool(await _addresses(host))


async def _addresses(host: str) -> list[tuple[int, int, int, str, tuple[object, ...]]]:
    try:
        return list(await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_STREAM))
    except OSError:
        return []  # the connection to it fails with a better error


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


# ---- Services inside an agent's process, for jobs that name none.


@asynccontextmanager
async def embedded_rendezvous(run_id: str = "") -> AsyncIterator[str]:
    """Serve a run's rendezvous at a socket of this user as long as the context lasts; yield the endpoint."""
    with new_run_socket("rendezvous", run_id) as endpoint:
        async with rendezvous_server(ServerOptions(host=endpoint), run_id):
            yield endpoint


@dataclass(frozen=True, slots=True)
class RendezvousServer:
    """A rendezvous service of this process: its started server, and its runs."""

    server: Server
    engine: RendezvousEngine


_MOST_NAMES = 100

_log = get_logger("rallypoint.run")


class _OtherRuns(SingleShardLocator):
    """Warns once of each other run than the agent's own: the hosts of one job may have different names for it."""

    def __init__(self, shard: Shard, run_id: str) -> None:
        super().__init__(shard)
        self._run_id = run_id
        self._seen: set[str] = set()

    def writer(self, run_id: str) -> Shard:
        """Return the shard."""
        if run_id != self._run_id and run_id not in self._seen and len(self._seen) < _MOST_NAMES:
            self._seen.add(run_id)
            _log.warning(
                "another run was requested from this agent's rendezvous",
                requested=run_id,
                served=self._run_id,
                sentence=f"a node asks for run {run_id!r} here, but this agent serves run {self._run_id!r}: do all "
                "hosts of the job have the same --rdzv-id?",
            )
        return super().writer(run_id)


@asynccontextmanager
async def rendezvous_server(options: ServerOptions, run_id: str = "") -> AsyncIterator[RendezvousServer]:
    """Serve rendezvous as long as the context lasts, in memory only.

    Args:
        options: Where and how it listens.
        run_id: The run of this agent, which warns if a node asks for another one; empty: all are expected.

    Raises:
        ServiceStartError: The server can't listen.
    """
    async with AsyncExitStack() as stack:
        shard = await stack.enter_async_context(own_shard(MemoryJournal()))
        services = registrations(_OtherRuns(shard, run_id) if run_id else SingleShardLocator(shard))
        server = Server(options, services=services, translate=translate_rendezvous)
        await server.start()
        stack.push_async_callback(server.stop)
        yield RendezvousServer(server, shard.engine)


@asynccontextmanager
async def embedded_timer(run_id: str = "") -> AsyncIterator[str]:
    """Serve timers at a socket of this user as long as the context lasts; yield the endpoint.

    Args:
        run_id: Name of the run that uses them, by which the socket is found; empty: of several runs.
    """
    with new_run_socket("timer", run_id) as endpoint:
        server = Server(
            ServerOptions(host=endpoint), services=[timer_registration()], translate=translate_timer
        )
        await server.start()
        try:
            yield endpoint
        finally:
            await server.stop()
