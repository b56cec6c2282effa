"""Addresses and ports of this host at which workers meet."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rallypoint.agent.spawner.protocol import parse_ranges
from rallypoint.agent.spawner.spawner import descendants
from rallypoint.rpc.endpoint import Endpoint, SettingError, parse_endpoint, parse_endpoints
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.pace import Pace
from rallypoint.rpc.text import text_in

# Candidates for MASTER_PORT, the best band first: above Linux's default range of ephemeral ports, where few programs
# have a fixed port; then below it, without those of this project and of torchrun (29400 and up) and of Kubernetes'
# services (30000 to 32767); last the band in which scripts often choose ports.
_BANDS = (range(61000, 65536), range(20000, 29400), range(10000, 20000))
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_RESERVED = Path("/proc/sys/net/ipv4/ip_local_reserved_ports")

_log = get_logger("rallypoint.agent")


def local_address_towards(endpoint: str) -> str:
    """Return the source address of this host's connections to an endpoint, or to the first reachable one of several.

    It does no reverse look-up, and no other host has to resolve this host's name: clusters without DNS work.

    Args:
        endpoint: One, or several separated by commas.

    Raises:
        SettingError: None of the endpoints' names can be resolved.
    """
    # Loopback endpoints come last: the source address towards them is useless to other hosts.
    *others, last = sorted(parse_endpoints(endpoint).endpoints, key=lambda target: target.loopback)
    for target in others:
        with suppress(SettingError):
            return _towards(target)
    return _towards(last)


async def own_address_towards(endpoint: str, timeout: float) -> str:
    """Like `local_address_towards`, but retry while the name can't be resolved.

    Orchestrators publish the name of a host once it runs. An agent that starts earlier waits, as it does for a
    service that does not reply yet.

    Args:
        timeout: Seconds after which the name counts as wrong.

    Raises:
        SettingError: The name can't be resolved, or there is no route; one line.
    """
    if parse_endpoints(endpoint).loopback:
        return local_address_towards(endpoint)
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    backoff, first = Pace().backoff(), True
    while True:
        try:
            return await asyncio.to_thread(local_address_towards, endpoint)
        except SettingError as error:
            if (left := deadline - clock()) <= 0:
                raise SettingError(f"{error} (retried for {timeout:g} s)") from None
            if first:  # log the first attempt only
                _log.warning(
                    "rendezvous is not reachable yet, trying again", endpoint=endpoint, error=str(error)
                )
        first = False
        await asyncio.sleep(min(backoff.next(), left))


def _towards(target: Endpoint) -> str:
    if target.loopback:
        return "127.0.0.1"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            target.host, target.port, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # a datagram socket: the kernel looks up the route and sends nothing
            own = str(probe.getsockname()[0])
    except OSError as error:
        raise SettingError(
            f"can't find a route to {target}: {error.strerror or error}; check --rdzv-endpoint or --master-addr, "
            "or give this host's address with --local-addr"
        ) from None
    # The target is this host's own name, and resolves here to an address that only this host can reach, as on Debian.
    return target.host if ipaddress.ip_address(own).is_loopback else own


def advertised(listening: str, *, named: bool) -> str:
    """Return the endpoint at which other hosts reach a server of this host.

    Args:
        listening: The endpoint at which it listens; a wildcard address is replaced by one of this host's addresses.
        named: Use the host's name, which certificates contain, instead of an address.
    """
    endpoint = parse_endpoint(listening)
    if endpoint.host not in ("0.0.0.0", "::"):  # noqa: S104 (compared, not bound)
        return listening
    if named:
        host = socket.gethostname()
    else:
        try:
            # Addresses reserved for documentation: nothing is sent, the kernel looks up the default route.
            host = local_address_towards("192.0.2.1:9" if endpoint.host == "0.0.0.0" else "[2001:db8::1]:9")  # noqa: S104
        except SettingError:
            host = "127.0.0.1" if endpoint.host == "0.0.0.0" else "::1"  # noqa: S104
    return str(Endpoint(host, endpoint.port))


class MasterPort:
    """The TCP port of this host at which the workers of a round meet, reserved until they bind it.

    A worker binds it seconds after it was chosen: workers start once all nodes have confirmed, and import for a while.
    Meanwhile three things keep it free.

    - It is outside of the ports that the kernel gives to programs that connect, or that bind to any port.
    - An agent owns its ports among the agents of its host: an abstract Unix socket is named for each. Such names
      belong to the same network namespace as the port, and end with their process.
    - A socket is bound to it until the workers start. Not longer: a program that binds without SO_REUSEADDR, as many
      do, would find it taken.
    """

    def __init__(self) -> None:
        """Create it without a port."""
        self._ownership: socket.socket | None = None
        self._holder: socket.socket | None = None

    def reserve(self) -> int:
        """Reserve a port other than the previous one, and release that one.

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
        """Unbind the port for the workers, which are about to start; other agents still do not choose it."""
        _close((self._holder,))
        self._holder = None

    def close(self) -> None:
        """Release the port."""
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
            "another program may take MASTER_PORT before the workers bind it: all ports of this host are ephemeral; "
            "reserve some with the sysctl net.ipv4.ip_local_reserved_ports, as in 61000-61999"
        )
        self._holder, self._ownership = _bind(0), None
        given: int = self._holder.getsockname()[1]
        return given


def is_taken_by_another(port: int, spawner: int) -> bool:
    """True if a TCP port of this host belongs to a program other than the workers and their descendants.

    Args:
        spawner: Process id of the spawner, the ancestor of all workers.
    """
    try:
        with socket.socket() as probe:
            # Closed connections don't occupy the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("0.0.0.0", port))  # noqa: S104 (bound, not served)
            probe.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return not _is_served_below(spawner, port)
    return False


def _is_served_below(root: int, port: int) -> bool:
    """True if a descendant of a process listens at a port."""
    import psutil  # noqa: PLC0415 (slow to load, and rarely needed: a worker could not bind its port)

    for process in descendants(root):
        # RuntimeError, OSError: /proc/net is missing or unusual.
        with suppress(psutil.Error, OSError, RuntimeError):
            for each in psutil.Process(process.pid).net_connections("tcp"):
                if each.status == psutil.CONN_LISTEN and each.laddr.port == port:
                    return True
    return False


def _ports_of_no_other_use() -> list[int]:
    """The ports that the kernel does not give to programs, of the first band that has some."""
    low, high = 32768, 60999  # Linux's own default
    with suppress(OSError, ValueError):
        low, high = (int(word) for word in _EPHEMERAL.read_text().split())
    reserved = parse_ranges(text_in(_RESERVED))
    for band in _BANDS:
        # Reserved ports are probably reserved for a program: they are the last resort.
        if ports := [port for port in band if not low <= port <= high and port not in reserved]:
            return ports
    return [port for band in _BANDS for port in band if port in reserved]


def _own(port: int) -> socket.socket | None:
    """A socket that represents the ownership of a port among this host's agents; None if another agent owns it."""
    ownership = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        ownership.bind(f"\0rallypoint/master_port/{port}")
    except OSError:
        ownership.close()
        return None
    return ownership


def _bind(port: int) -> socket.socket:
    """A socket bound to a port at all addresses; 0: any port.

    Raises:
        OSError: A program has bound it, at any address.
    """
    for family, wildcard in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):  # noqa: S104 (bound, not served)
        try:
            holder = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            if family == socket.AF_INET:
                raise
            continue  # this host has no IPv6
        try:
            if family == socket.AF_INET6:
                holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            holder.bind((wildcard, port))
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
