"""What can be set on a server and on a client, as plain values, and the error for what cannot be honoured."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


class SettingError(ValueError):
    """A setting that cannot be honoured. Its text is one line for the person who chose the setting."""


class ServiceStartError(SettingError):
    """A server cannot start as it was told to: port in use, TLS files unusable, plaintext refused."""


class PortInUseError(ServiceStartError):
    """Another program listens where a server is to."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How one server process listens, logs and ends. Field `tls_cert` is the flag `--tls-cert`, and so on."""

    host: str = "127.0.0.1"
    """Name or address to listen on, or `unix:/path` (then `port` is ignored). Only loopback and Unix sockets
    may go without TLS."""

    port: int = 0
    """0 to 65535. 0 lets the kernel choose; `Server.address` then tells."""

    tls_cert: Path | None = None
    """PEM certificate chain of the server, its own certificate first. Read again when the file changes."""

    tls_key: Path | None = None
    """PEM private key of `tls_cert`, not encrypted."""

    tls_client_ca: Path | None = None
    """PEM certificates that must have signed a client's certificate. Given: clients without one are refused."""

    insecure: bool = False
    """Allow plaintext on any address. Whoever can reach the port can then read and steer every run."""

    drain_grace: float = 5.0
    """Seconds that open calls get to end after SIGTERM. 5 stays below the 10 s after which `docker stop`
    kills; longer makes restarts slower, shorter cuts more calls off."""

    request_rate: float = 10_000.0
    """Calls a second that one client (host, or /64 of IPv6) may begin; 0: any number. Over it: RESOURCE_EXHAUSTED,
    TOO_MANY_REQUESTS. 10,000 is more than a process on one core serves, so that a thousand agents behind one address
    never meet it: lower it where hosts that don't trust each other share a service."""

    request_burst: int = 20_000
    """Calls that one client may begin at once; at least 1. 20,000 are every node of the largest run, reconnecting
    from one address."""

    log_level: str = "info"
    """debug, info, warning or error."""

    log_format: str = "auto"
    """human, json, or auto: human on a terminal, json otherwise."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """What TLS files are called where they were given, for messages."""

    certificate: str = "--tls-cert"
    key: str = "--tls-key"
    authorities: str = "--tls-ca"


@dataclass(frozen=True, slots=True)
class ClientTLS:
    """The files with which a client speaks TLS."""

    ca: Path | None = None
    """PEM certificates that must have signed the server's. None: the public roots that gRPC carries."""

    certificate: Path | None = None
    """PEM certificate chain that this client shows (mutual TLS); goes with `key`."""

    key: Path | None = None
    """PEM private key of `certificate`, not encrypted."""

    names: FileNames = field(default=FileNames(), compare=False, repr=False)
    """What the files are called where they were given."""
