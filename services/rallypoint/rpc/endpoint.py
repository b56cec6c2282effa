"""Endpoints (`host:port`, `[ipv6]:port` or `unix:/path`), and the settings of servers and clients."""

from __future__ import annotations

import errno
import ipaddress
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from rallypoint.rpc.text import whole_number

# ---- Settings of a server and of a client, as plain values, and the error for a setting that cannot be applied.


class SettingError(ValueError):
    """A setting that cannot be applied. Its text is one line for the person who chose the setting."""


_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EROFS}


def host_exhausted(error: BaseException) -> bool:
    """True if an OSError, or the OSError behind an error, means that this host lacks files, memory or disk space."""
    cause = error if isinstance(error, OSError) else error.__cause__
    return isinstance(cause, OSError) and cause.errno in _EXHAUSTED


class ServiceStartError(SettingError):
    """A server cannot start with its settings: port in use, TLS files unusable, plaintext refused."""


class PortInUseError(ServiceStartError):
    """Another program listens on the server's address."""


@dataclass(frozen=True, slots=True)
class RunSecret:
    """A text that only the hosts of a job hold: both ends of a connection prove that they hold it."""

    text: str = field(repr=False)

    token: Path | None = None
    """File with the token that a client sends with each call; None: it sends none."""


CERTIFIED_NAME = "run-secret.rallypoint.internal"
"""Name in the certificates that come from a run secret, which clients check in place of the host's."""


@dataclass(frozen=True, slots=True)
class Plaintext:
    """The choice to speak plaintext over TCP: any host on the way can read and change everything."""


@dataclass(frozen=True, slots=True)
class AccessFiles:
    """The files by which a server decides on calls. Field `token_keys` is the flag `--token-keys`, and so on."""

    policy: Path | None = None
    """TOML file that grants roles for runs to the names in clients' certificates; see `rallypoint.serving.policy`. The
    server must require certificates. None: a client that could connect may call everything."""

    token_keys: Path | None = None
    """PEM public keys (Ed25519) of those who issue tokens. If set, a client without a certificate needs a token, and a
    client with a token has the rights in it. Read again when the file changes. Needs TLS files or a run secret."""

    audit_log: Path | None = None
    """File to which refused calls and actions of operators are appended, a line of JSON each."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server process. Field `tls_cert` is the flag `--tls-cert`, and so on."""

    host: str = "127.0.0.1"
    """Name or address to listen on, or `unix:/path` (then `port` is ignored)."""

    port: int = 0
    """0 to 65535. 0 lets the kernel choose; `Server.address` then has the port."""

    tls_cert: Path | None = None
    """PEM certificate chain of the server, its own certificate first. Read again when the file changes."""

    tls_key: Path | None = None
    """PEM private key of `tls_cert`, not encrypted."""

    tls_client_ca: Path | None = None
    """PEM certificates that must have signed a client's certificate. If set, clients without one are refused."""

    run_secret: RunSecret | None = None
    """Secret that clients must hold, in place of TLS files. Without either, a loopback address takes the secret of this
    user, and another address is refused unless `insecure`."""

    insecure: bool = False
    """Serve plaintext at the TCP address. Every client that can reach the port can then read and control every run."""

    access: AccessFiles = AccessFiles()
    """Which calls of the clients that could connect are refused, and recorded."""

    health: bool = True
    """Offer `grpc.health.v1`, to every client that can connect."""

    reflection: bool = True
    """Offer reflection, so that grpcurl and buf curl need no protos, to every client that can connect."""

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

    request_byte_rate: int = 32 << 20
    """Bytes of requests a second that one client may send, those of streams aside; 0: unlimited. Half of it at once,
    and one request of the largest size always. Above it: RESOURCE_EXHAUSTED, TOO_MANY_REQUESTS. A client that writes
    more to a store delays the messages of others."""

    max_watches_per_client: int = 500
    """Calls of one client address that may be open at a time, of those that answer one request with a stream of changes
    or lines; 0: unlimited. Above it: RESOURCE_EXHAUSTED, TOO_MANY_WATCHERS. 500 are half of the watchers that a run may
    have."""

    log_level: str = "info"
    """debug, info, warning or error."""

    log_format: str = "auto"
    """human, json, or auto: human on a terminal, json otherwise."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain with its private key, and the authorities that must have signed the peer's, all PEM."""

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None


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

    token: Path | None = None
    """As of `RunSecret`."""

    names: FileNames = field(default=FileNames(), compare=False, repr=False)
    """Names of the files in messages."""


ClientSecurity: TypeAlias = ClientTLS | RunSecret | Plaintext | None
"""How a client secures its connections. None: nothing was configured; then a Unix socket is used as it is, a loopback
address takes the secret of this user, and any other address is refused."""


@dataclass(frozen=True, slots=True)
class CallTarget:
    """The service that a command calls.

    Attributes:
        endpoint: Its address, or those of several replicas, separated by commas.
        timeout: Seconds for a call, retries included.
    """

    endpoint: str
    security: ClientSecurity
    timeout: float


_EXPECTED = "expected host:port, [ipv6]:port or unix:/path"
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")
LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's path: sun_path of Linux holds 108, including the final NUL."""


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
        ip = ip_address(self.host)
        return f"dns:///{self}" if ip is None else f"ipv{ip.version}:{self}".replace("%", "%25")

    @property
    def loopback(self) -> bool:
        """True if only this machine can reach it: 127.0.0.0/8, ::1, localhost, a Unix socket."""
        if self.path is not None or self.host.lower() == "localhost":
            return True
        ip = ip_address(self.host)
        return ip is not None and ip.is_loopback


def ip_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return a host as an address; None: it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


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
    if len(path.encode()) > LONGEST_SOCKET_PATH:
        raise EndpointError(f"endpoint {text!r} is too long: a socket path has at most 107 bytes")
    return Endpoint("", 0, path)


def _host(host: str, text: str) -> str:
    if host.startswith("["):
        address = host.removeprefix("[").removesuffix("]")
        # The zone, after a %, is any text for ip_address.
        found = ip_address(address) if len(address) <= 253 and address.isprintable() else None
        if not isinstance(found, ipaddress.IPv6Address):
            raise EndpointError(f"endpoint {text!r} has no IPv6 address between its brackets")
        return str(found)
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


# ---- How a client secures its connections: the choice, from flags and the environment.

SECRET_VARIABLE = "RALLYPOINT_RUN_SECRET"  # noqa: S105 (the name of a variable)
"""Environment variable with the text of the run secret."""

# Below this, the text may be found by trying.
_SHORTEST_SECRET = 16


def run_secret(file: Path | None = None) -> RunSecret | None:
    """Return the run secret that a file has, else the environment (also as a file's name); None: there is none.

    Raises:
        SettingError: it can't be read, or is too short; one line.
    """
    text, where = os.environ.get(SECRET_VARIABLE, "").strip(), SECRET_VARIABLE
    flag = "--run-secret-file"
    if file is None and (named := os.environ.get(f"{SECRET_VARIABLE}_FILE")):
        file, flag = Path(named), f"{SECRET_VARIABLE}_FILE"
    if file is not None:
        where = f"{flag} {file}"
        try:
            text = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise SettingError(f"{where}: {reason}") from None
    elif not text:
        return None
    if len(text) < _SHORTEST_SECRET:
        raise SettingError(
            f"{where} has {len(text)} characters, and {_SHORTEST_SECRET} is the least: make one with "
            "`openssl rand -hex 32`"
        )
    return RunSecret(text)


def client_security(
    tls: ClientTLS | None, secret: RunSecret | None, *, insecure: bool, token: Path | None = None
) -> ClientSecurity:
    """Return how a client secures its connections; TLS files are preferred to a secret.

    Args:
        tls: TLS files; None: there are none.
        secret: The run secret; None: there is none.
        insecure: True for plaintext.
        token: File with a token for each call. Alone, it is sent to servers with a certificate of a public authority.

    Raises:
        SettingError: `insecure` contradicts the others; one line.
    """
    if insecure and (tls or secret or token):
        given = "the --tls flags" if tls else "the run secret" if secret else "--token-file"
        raise SettingError(f"--insecure and {given} contradict each other: leave one of them out")
    if insecure:
        return Plaintext()
    chosen = tls or secret
    return chosen if token is None else replace(chosen or ClientTLS(), token=token)
