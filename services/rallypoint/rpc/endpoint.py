"""Endpoints (`host:port`, `[ipv6]:port` or `unix:/path`), and the settings of servers and clients."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from rallypoint.rpc.text import whole_number

# ---- Settings of a server and of a client, as plain values, and the error for a setting that cannot be applied.


class SettingError(ValueError):
    """A setting that cannot be applied. Its text is one line for the person who chose the setting."""


class ServiceStartError(SettingError):
    """A server cannot start with its settings: port in use, TLS files unusable, plaintext refused."""


class PortInUseError(ServiceStartError):
    """Another program listens on the server's address."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server process. Field `tls_cert` is the flag `--tls-cert`, and so on."""

    host: str = "127.0.0.1"
    """Name or address to listen on, or `unix:/path` (then `port` is ignored). Only loopback and Unix sockets
    may go without TLS."""

    port: int = 0
    """0 to 65535. 0 lets the kernel choose; `Server.address` then has the port."""

    tls_cert: Path | None = None
    """PEM certificate chain of the server, its own certificate first. Read again when the file changes."""

    tls_key: Path | None = None
    """PEM private key of `tls_cert`, not encrypted."""

    tls_client_ca: Path | None = None
    """PEM certificates that must have signed a client's certificate. If set, clients without one are refused."""

    insecure: bool = False
    """Allow plaintext on any address. Every client that can reach the port can then read and control every run."""

    drain_grace: float = 5.0
    """Seconds that open calls get to end after SIGTERM. 5 is below the 10 s after which `docker stop` kills;
    longer makes restarts slower, shorter cuts off more calls."""

    request_rate: float = 10_000.0
    """Calls a second that one client (host, or /64 of IPv6) may begin; 0: unlimited. Above it: RESOURCE_EXHAUSTED,
    TOO_MANY_REQUESTS. 10,000 is more than a process on one core serves, so that a thousand agents behind one address
    never reach it: lower it if hosts that do not trust each other share a service."""

    request_burst: int = 20_000
    """Calls that one client may begin at once; at least 1. 20,000 are enough for every node of the largest run to
    reconnect from one address."""

    log_level: str = "info"
    """debug, info, warning or error."""

    log_format: str = "auto"
    """human, json, or auto: human on a terminal, json otherwise."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """Names of the TLS files in messages: the flags or settings that gave them."""

    certificate: str = "--tls-cert"
    key: str = "--tls-key"
    authorities: str = "--tls-ca"


@dataclass(frozen=True, slots=True)
class ClientTLS:
    """The TLS files of a client."""

    ca: Path | None = None
    """PEM certificates that must have signed the server's. None: the public roots that gRPC carries."""

    certificate: Path | None = None
    """PEM certificate chain that this client sends (mutual TLS); requires `key`."""

    key: Path | None = None
    """PEM private key of `certificate`, not encrypted."""

    names: FileNames = field(default=FileNames(), compare=False, repr=False)
    """Names of the files in messages."""


_EXPECTED = "expected host:port, [ipv6]:port or unix:/path"
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
# sun_path of Linux holds 108 bytes, including the final NUL.
_LONGEST_SOCKET_PATH = 107


class EndpointError(SettingError):
    """Text that is not an endpoint, or names one that cannot exist."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An address to connect to or to listen on: either `path`, or `host` (IPv6 without brackets) and `port`."""

    host: str
    port: int
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """Return it for gRPC, with an explicit scheme, so that an address is never resolved as a name."""
        if self.path is not None:
            return f"unix:{self.path}"
        try:
            version = ipaddress.ip_address(self.host).version
        except ValueError:
            return f"dns:///{self}"
        return f"ipv{version}:{self}".replace("%", "%25")

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach it: 127.0.0.0/8, ::1, localhost, a Unix socket."""
        if self.path is not None or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def without_password(text: str) -> str:
    """Return an endpoint or URL without the password that may be in it; for messages.

    The part before the last @ counts as user and password, because a password may contain a slash that was not quoted
    and looks like the end of a host.
    """
    scheme, mark, rest = text.partition("://") if "://" in text else ("", "", text)
    userinfo, _, host = rest.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    shown = f"{scheme}{mark}{user}:***@{host}" if colon else text
    return re.sub(r"([?&]password=)[^&]*", r"\1***", shown)


def parse_endpoint(text: str) -> Endpoint:
    """Parse an endpoint to connect to.

    Args:
        text: `host:port`, `[ipv6]:port` or `unix:/path`; port 1 to 65535.

    Raises:
        EndpointError: it is none of these; the message names the mistake.
    """
    if text.startswith("unix:"):
        return _socket(text)
    shown = without_password(text)
    if "://" in text:
        raise EndpointError(f"endpoint {shown!r} has a scheme, {_EXPECTED}")
    host, colon, port = text.rpartition(":")
    if not colon or (host.startswith("[") and text.endswith("]")):
        raise EndpointError(f"endpoint {shown!r} has no port, {_EXPECTED}")
    if "@" in text:
        raise EndpointError(f"endpoint {shown!r} has an @, {_EXPECTED}")
    if ":" in host and not host.startswith("["):
        raise EndpointError(
            f"endpoint {shown!r} is ambiguous: put an IPv6 address in brackets, [{host}]:{port}"
        )
    if (number := whole_number(port, 1, 65535)) is None:
        raise EndpointError(f"endpoint {shown!r} has port {port!r}, expected a number from 1 to 65535")
    return Endpoint(_host(host, shown), number)


def listening_endpoint(host: str, port: int) -> Endpoint:
    """Parse an address to listen on.

    Args:
        host: a name or address (IPv6 with or without brackets), or `unix:/path`.
        port: 0 to 65535, 0 for one that the kernel chooses; ignored with `unix:`.

    Raises:
        EndpointError: the address is not valid.
    """
    if host.startswith("unix:"):
        return _socket(host)
    if not 0 <= port <= 65535:
        raise EndpointError(f"--port {port} is not a number from 0 to 65535")
    try:
        return Endpoint(_host(f"[{host}]" if ":" in host and not host.startswith("[") else host, host), port)
    except EndpointError:
        raise EndpointError(f"--host {host!r} is no host name, no address and no unix:/path") from None


def _socket(text: str) -> Endpoint:
    path = text.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/"):
        raise EndpointError(f"endpoint {text!r} needs an absolute path, as in unix:/run/rallypoint.sock")
    if len(path.encode()) > _LONGEST_SOCKET_PATH:
        raise EndpointError(f"endpoint {text!r} is too long: a socket path has at most 107 bytes")
    return Endpoint("", 0, path)


def _host(host: str, text: str) -> str:
    if host.startswith("["):
        address = host.removeprefix("[").removesuffix("]")
        try:
            return str(ipaddress.IPv6Address(address))
        except ValueError:
            raise EndpointError(f"endpoint {text!r} has no IPv6 address between its brackets") from None
    if len(host) > 253 or not _NAME.fullmatch(host):
        raise EndpointError(f"endpoint {text!r} has no valid host name or address, {_EXPECTED}")
    return host


# ---- The endpoints of a service with several replicas: a list, as in `a:29400,b:29400,c:29400`.


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Endpoints of one service, without duplicates, in the given order; at least one."""

    endpoints: tuple[Endpoint, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.endpoints))

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach all of them."""
        return all(endpoint.loopback for endpoint in self.endpoints)


def parse_endpoints(text: str) -> Endpoints:
    """Parse the endpoints of a service.

    Args:
        text: One or more of `host:port`, `[ipv6]:port` and `unix:/path`, separated by commas. A name may have
            several addresses. Duplicates are dropped.

    Raises:
        EndpointError: A part is none of these; the message names the part and the mistake.
    """
    parts = [part.strip() for part in text.split(",")]
    # An endpoint has no password; if one was given, no part of it may appear in a message as an endpoint.
    if len(parts) == 1 or ("@" in text and "unix:" not in text):
        return Endpoints((parse_endpoint(text),))
    endpoints = []
    for number, part in enumerate(parts, 1):
        if not part:
            raise EndpointError(
                f"endpoint {number} of {text!r} is empty, expected host:port,host:port and so on"
            )
        try:
            endpoints.append(parse_endpoint(part))
        except EndpointError as error:
            raise EndpointError(f"endpoint {number} of {len(parts)}: {error}") from None
    return Endpoints(tuple(dict.fromkeys(endpoints)))
