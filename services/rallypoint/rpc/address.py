"""Addresses of the replicas of a service, resolved from its endpoints."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rallypoint.rpc.endpoint import Endpoint, Endpoints, ip_address

RESOLVE_TIMEOUT = 5.0
"""Timeout of the name service, seconds; a resolver's own timeout is several times longer."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Return the addresses of a host name, for a port; raise OSError if there are none."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of one replica. Compares by `endpoint` alone.

    Attributes:
        endpoint: Host and port to connect to; the host may be a name that gRPC resolves.
        listed: The configured endpoint that resolved to it; its host must be in the server's certificate.
    """

    endpoint: Endpoint
    listed: Endpoint = field(compare=False)

    def __str__(self) -> str:
        return str(self.endpoint)

    @classmethod
    def of(cls, endpoint: Endpoint) -> Address:
        """Return the address of an endpoint that is not resolved."""
        return cls(endpoint, endpoint)


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host name from the system's resolver.

    Raises:
        OSError: There are none, or the name service does not reply.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def listed_addresses(endpoints: Endpoints, resolve: Resolve = addresses_of) -> list[Address]:
    """Return the addresses of all endpoints, in their order, without duplicates.

    A name that cannot be resolved is returned as it is: gRPC resolves it again and reports the error.
    """
    found = await asyncio.gather(*(_addresses(endpoint, resolve) for endpoint in endpoints.endpoints))
    return list(dict.fromkeys(address for addresses in found for address in addresses))


def has_name(endpoint: Endpoint) -> bool:
    """True if an endpoint has a host name, which may resolve to several addresses, and to others later."""
    return endpoint.path is None and ip_address(endpoint.host) is None


async def _addresses(endpoint: Endpoint, resolve: Resolve) -> list[Address]:
    if not has_name(endpoint):
        return [Address.of(endpoint)]
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            addresses = await resolve(endpoint.host, endpoint.port)
    except (OSError, TimeoutError, UnicodeError):
        return [Address.of(endpoint)]
    resolved = [Address(Endpoint(address, endpoint.port), endpoint) for address in addresses]
    return resolved or [Address.of(endpoint)]
