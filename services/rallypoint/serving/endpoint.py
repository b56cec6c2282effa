"""What an endpoint looks like: `host:port`, `[ipv6]:port` or `unix:/path`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from rallypoint.serving.settings import SettingError

_EXPECTED = "expected host:port, [ipv6]:port or unix:/path"
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
# sun_path of Linux holds 108 bytes, the closing NUL included.
_LONGEST_SOCKET_PATH = 107


class EndpointError(SettingError):
    """Text that is not an endpoint, or names one that cannot exist."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A place to connect to or to listen on: either `path`, or `host` (IPv6 without brackets) and `port`."""

    host: str
    port: int
    path: str | None = None

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """The same for gRPC, with an explicit scheme, so that an address is never looked up as a name."""
        if self.path is not None:
            return f"unix:{self.path}"
        try:
            version = ipaddress.ip_address(self.host).version
        except ValueError:
            return f"dns:///{self}"
        return f"ipv{version}:{self}".replace("%", "%25")

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it: 127.0.0.0/8, ::1, localhost, a Unix socket."""
        if self.path is not None or self.host.lower() == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def without_password(text: str) -> str:
    """An endpoint or URL as it was given, without the password that may be in it; for messages.

    What looks like a host may be a part of a password in which somebody forgot to quote a slash: all up to the last @
    counts as one.
    """
    scheme, mark, rest = text.partition("://") if "://" in text else ("", "", text)
    userinfo, _, place = rest.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    shown = f"{scheme}{mark}{user}:***@{place}" if colon else text
    return re.sub(r"([?&]password=)[^&]*", r"\1***", shown)


def parse_endpoint(text: str) -> Endpoint:
    """Reads an endpoint to connect to.

    Args:
        text: `host:port`, `[ipv6]:port` or `unix:/path`; port 1 to 65535.

    Raises:
        EndpointError: it is none of these; the message says what is wrong with it.
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
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise EndpointError(f"endpoint {shown!r} has port {port!r}, expected a number from 1 to 65535")
    return Endpoint(_host(host, shown), int(port))


def listening_endpoint(host: str, port: int) -> Endpoint:
    """Reads where to listen.

    Args:
        host: a name or address (IPv6 with or without brackets), or `unix:/path`.
        port: 0 to 65535, 0 for one that the kernel chooses; ignored with `unix:`.

    Raises:
        EndpointError: there cannot be such a place.
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
