"""Whom a peer address of gRPC stands for when it is counted who asks how often."""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import unquote


# A connection keeps its address, and asks again and again. 65,536: several times the connections of a large service;
# each entry takes about 300 bytes.
@lru_cache(maxsize=65_536)
def client_of(peer: str) -> str:
    """The client behind `context.peer()`: its host, whatever the port.

    An IPv6 client is its /64: whoever has one address of it has them all. Unix sockets have no address, so everybody
    at the service's own socket is one client. A certificate doesn't count, nor a token: a fleet often shares one, and
    the address of a connection can't be forged.
    """
    scheme, _, place = peer.partition(":")
    if scheme == "ipv4":
        return place.rpartition(":")[0]
    if scheme == "ipv6":
        # As in ipv6:%5Bfe80::1%25eth0%5D:50051; the brackets are encoded by some versions only.
        host = unquote(place).rpartition(":")[0].strip("[]").partition("%")[0]
        try:
            return str(ipaddress.IPv6Network((host, 64), strict=False))
        except ValueError:
            return host
    return scheme
