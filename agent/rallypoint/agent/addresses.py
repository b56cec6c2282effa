"""Addresses and ports of this host, for workers to meet at."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from rallypoint.serving.endpoint import Endpoint, parse_endpoint
from rallypoint.serving.endpoints import parse_endpoints
from rallypoint.serving.settings import SettingError


def local_address_towards(endpoint: str) -> str:
    """The address of this host that others see when it talks to an endpoint, or to the first of several that it can.

    No name is looked up in reverse, and none of this host's need resolve elsewhere: clusters without DNS work.

    Args:
        endpoint: One, or several separated by commas.

    Raises:
        SettingError: The endpoint's own name can't be resolved, or those of all.
    """
    # One on this host alone says nothing of how others see it.
    *others, last = sorted(parse_endpoints(endpoint).places, key=lambda place: place.loopback)
    for place in others:
        with suppress(SettingError):
            return _towards(place)
    return _towards(last)


def _towards(place: Endpoint) -> str:
    if place.loopback:
        return "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            place.host, place.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent, the route is looked up
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise SettingError(
            f"can't find the way to {place}: {error.strerror or error}; check --rdzv-endpoint or --master-addr, "
            "or give this host's address with --local-addr"
        ) from None
    # It is this host's own name, and here it leads to an address that only this host can reach, as Debian has it.
    return place.host if ipaddress.ip_address(own).is_loopback else own


def advertised(listening: str, *, named: bool) -> str:
    """Where others reach a server of this host.

    Args:
        listening: Where it listens; an address that stands for all of this host's is replaced by one of them.
        named: By the host's name, as certificates have it, rather than by an address.
    """
    place = parse_endpoint(listening)
    if place.host not in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
        return listening
    if named:
        host = socket.gethostname()
    else:
        try:
            # Of a network for examples: nothing is sent there, the route that leads out of this host is looked up.
            host = local_address_towards("192.0.2.1:9" if place.host == "0.0.0.0" else "[2001:db8::1]:9")  # noqa: S104
        except SettingError:
            host = "127.0.0.1" if place.host == "0.0.0.0" else "::1"  # noqa: S104
    return str(Endpoint(host, place.port))


def free_port(address: str) -> int:
    """A TCP port that nobody uses at an address of this host, just now.

    It is free again when this returns, so that a worker can take it. That another program takes it first is
    possible, and harmless: the worker fails, and the next round has a new port.
    """
    for family, place in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):  # noqa: S104 (bound, not served)
        if (":" in address) == (family == socket.AF_INET6):
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind((place, 0))
                port: int = probe.getsockname()[1]
                return port
    raise AssertionError("an address is of one family or the other")
