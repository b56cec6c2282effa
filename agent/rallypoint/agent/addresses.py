"""Addresses and ports of this host, for workers to meet at."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rallypoint.agent.spawner.spawner import descendants
from rallypoint.rpc.endpoint import Endpoint, SettingError, parse_endpoint, parse_endpoints
from rallypoint.rpc.logs import get_logger

# Ports for workers to meet at, the best band first: above Linux's default range of ephemeral ports, where few programs
# have a fixed one; then below it, without those of this project and of torchrun (29400 and up) and of Kubernetes'
# services (30000 to 32767); then where scripts like to count from.
_BANDS = (range(61000, 65536), range(20000, 29400), range(10000, 20000))
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")
_LISTENS = "0A"  # TCP_LISTEN, in /proc/net/tcp

_log = get_logger("rallypoint.agent")


def local_address_towards(endpoint: str) -> str:
    """The address of this host that others see when it talks to an endpoint, or to the first of several that it can.

    No name is looked up in reverse, and none of this host's need resolve elsewhere: clusters without DNS work.

    Args:
        endpoint: One, or several separated by commas.

    Raises:
        SettingError: The endpoint's own name can't be resolved, or those of all.
    """
    # One on this host alone says nothing of how others see it.
    *others, last = sorted(parse_endpoints(endpoint).endpoints, key=lambda place: place.loopback)
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


class MasterPort:
    """The TCP port of this host at which the workers of a round meet, kept from all others until they take it.

    A worker binds it seconds after it was chosen: it is started once all nodes have confirmed, and imports for a while.
    Meanwhile three things keep it free.

    - It is outside of the ports that the kernel gives to programs that connect, or that bind to any port.
    - An agent owns its ports among the agents of its host: an abstract Unix socket is named for each. Such names
      are of the same network namespace as the port, and end with their process.
    - A socket is bound to it until the workers start. No longer: programs that bind without SO_REUSEADDR, as many do,
      would find it taken.
    """

    def __init__(self) -> None:
        """There is none yet."""
        self._ownership: socket.socket | None = None
        self._holder: socket.socket | None = None

    def reserve(self) -> int:
        """Choose one, other than the one before; that one is kept no longer.

        Raises:
            OSError: This host has no port left.
        """
        former = self._ownership, self._holder
        try:
            port = self._choose()
        finally:
            _close(former)
        return port

    def hand_over(self) -> None:
        """Leave it to the workers, which are about to start; other agents go on to leave it alone."""
        _close((self._holder,))
        self._holder = None

    def close(self) -> None:
        """Keep none any more."""
        _close((self._ownership, self._holder))
        self._ownership = self._holder = None

    def _choose(self) -> int:
        candidates = _ports_of_no_other_use()
        first = secrets.randbelow(len(candidates)) if candidates else 0
        for port in candidates[first:] + candidates[:first]:
            if (ownership := _own(port)) is None:
                continue
            with suppress(OSError):
                self._holder = _bind(port)
                self._ownership = ownership
                return port
            ownership.close()
        _log.warning(
            "MASTER_PORT may be given to another program before the workers bind it: all ports are the kernel's to "
            "give; keep some with the sysctl net.ipv4.ip_local_reserved_ports, as 61000-61999",
        )
        self._holder, self._ownership = _bind(0), None
        given: int = self._holder.getsockname()[1]
        return given


def is_taken_by_another(port: int, spawner: int) -> bool:
    """Whether a program other than the workers and what they started has a TCP port of this host.

    Args:
        port: Which.
        spawner: The process below which all workers are.
    """
    try:
        with socket.socket() as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # connections that are over take no port
            probe.bind(("0.0.0.0", port))  # noqa: S104 (bound, not served)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return not (_listeners(port) & _sockets_below(spawner))
    return False


def _listeners(port: int) -> set[str]:
    """The sockets that listen at a port, as /proc names them."""
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == _LISTENS:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _sockets_below(root: int) -> set[str]:
    found: set[str] = set()
    for process in descendants(root):
        with suppress(OSError):
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    found.add(os.readlink(descriptor))
    return found


def _ports_of_no_other_use() -> list[int]:
    """Those that the kernel gives to no program; of the first band in which there are any."""
    low, high = 32768, 60999  # Linux's own default
    with suppress(OSError, ValueError):
        low, high = (int(word) for word in _EPHEMERAL.read_text().split())
    reserved: set[int] = set()
    with suppress(OSError, ValueError):
        for part in filter(None, _RESERVED.read_text().strip().split(",")):
            first, _, last = part.partition("-")
            reserved.update(range(int(first), int(last or first) + 1))
    for band in _BANDS:
        # What is reserved is for something: it is taken where there is nothing else.
        if ports := [port for port in band if not low <= port <= high and port not in reserved]:
            return ports
    return [port for band in _BANDS for port in band if port in reserved]


def _own(port: int) -> socket.socket | None:
    """What stands for the ownership of a port among the agents of this host; None if another one has it."""
    ownership = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        ownership.bind(f"\0rallypoint/master_port/{port}")
    except OSError:
        ownership.close()
        return None
    return ownership


def _bind(port: int) -> socket.socket:
    """A socket that has a port for itself, at all addresses; 0: any port.

    Raises:
        OSError: Some program has it, at some address.
    """
    for family, place in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 (bound, not served)
        try:
            holder = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            if family == socket.AF_INET:
                raise
            continue  # this host has no IPv6
        try:
            if family == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind((place, port))
        except OSError as error:
            holder.close()
            if family == socket.AF_INET or error.errno == errno.EADDRINUSE:
                raise
        else:
            return holder
    raise AssertionError("the last family raises")


def _close(sockets: Iterable[socket.socket | None]) -> None:
    for each in sockets:
        if each is not None:
            each.close()
