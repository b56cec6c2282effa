"""One replica of a service as clients know it: an address, and the name that its certificate is asked for."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from rallypoint.rpc.endpoint import Endpoint, Endpoints

RESOLVE_TIMEOUT = 5.0
"""Seconds that the name service has to answer; a resolver's own patience is several times that."""

Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""Finds the addresses of a host name, for a port; raises OSError where there are none."""


@dataclass(frozen=True, slots=True)
class Address:
    """An address to connect to; two of the same address are the same.

    Attributes:
        endpoint: The address, or a name that gRPC resolves.
        listed: What the address was found for; the server's certificate must have its host.
    """

    endpoint: Endpoint
    listed: Endpoint = field(compare=False)

    def __str__(self) -> str:
        return str(self.endpoint)

    @classmethod
    def of(cls, endpoint: Endpoint) -> Address:
        """The place that an endpoint itself names."""
        return cls(endpoint, endpoint)


async def addresses_of(host: str, port: int) -> Sequence[str]:
    """The addresses of a host name, as the machine's resolver has them.

    Raises:
        OSError: There are none, or the name service doesn't answer.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


async def listed_addresses(endpoints: Endpoints, resolve: Resolve = addresses_of) -> list[Address]:
    """All places that a list of endpoints stands for, in its order; each once.

    A name that can't be resolved stands for itself: gRPC, which asks again, says what is wrong with it.

    Args:
        endpoints: The list.
        resolve: Finds addresses; has RESOLVE_TIMEOUT seconds.
    """
    found = await asyncio.gather(*(_addresses(endpoint, resolve) for endpoint in endpoints.endpoints))
    return list(dict.fromkeys(place for places in found for place in places))


def has_name(endpoint: Endpoint) -> bool:
    """Whether an endpoint is given by name, which may have several addresses, and other ones later."""
    if endpoint.path is not None:
        return False
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return True
    return False


async def _addresses(endpoint: Endpoint, resolve: Resolve) -> list[Address]:
    if not has_name(endpoint):
        return [Address.of(endpoint)]
    try:
        async with asyncio.timeout(RESOLVE_TIMEOUT):
            addresses = await resolve(endpoint.host, endpoint.port)
    except (OSError, TimeoutError, UnicodeError):
        return [Address.of(endpoint)]
    places = [Address(Endpoint(address, endpoint.port), endpoint) for address in addresses]
    return places or [Address.of(endpoint)]
