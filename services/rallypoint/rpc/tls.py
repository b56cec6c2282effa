"""TLS from files: checked before use, so that errors name the wrong file; a server reloads them when they change."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from rallypoint.rpc.endpoint import ClientTLS, Endpoint, FileNames, ServerOptions, SettingError
from rallypoint.rpc.logs import get_logger

log = get_logger(__name__)


class TLSFileError(SettingError):
    """A TLS file cannot be read, is not valid, or does not match another. The message has file and flag."""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate chain with its private key, and the authorities that must have signed the peer's, all PEM."""

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None


def transport(options: ServerOptions) -> str:
    """Return the transport of a server with these options, for people: `plaintext`, `TLS` or `mutual TLS`."""
    if options.tls_cert is None:
        return "plaintext"
    return "TLS" if options.tls_client_ca is None else "mutual TLS"


def server_credentials(options: ServerOptions, endpoint: Endpoint) -> grpc.ServerCredentials | None:
    """Return the credentials of a server.

    Args:
        options: the TLS files, and whether plaintext is allowed.
        endpoint: the address to listen on; without TLS only loopback is accepted by default.

    Returns:
        None for plaintext. The credentials follow their files: a handshake after a change reads all of them again,
        and keeps the old ones while the new ones are unusable (half written, for example).

    Raises:
        TLSFileError: a file is missing, unusable or does not match.
        SettingError: plaintext outside loopback without `insecure`, or flags that contradict each other.
    """
    if options.tls_cert is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise SettingError(
                "--tls-client-ca requires certificates from clients, and needs --tls-cert and --tls-key"
            )
        if not (options.insecure or endpoint.loopback):
            raise SettingError(
                f"refusing to serve plaintext on {endpoint}, which other machines can reach: give --tls-cert and"
                " --tls-key, or --host 127.0.0.1, or --insecure where the network itself is trusted"
            )
        return None
    if options.insecure:
        raise SettingError("--insecure and --tls-cert contradict each other: leave one of them out")
    files = _Files(options.tls_cert, options.tls_key, options.tls_client_ca, _OF_SERVERS)
    first = files.read()
    return grpc.dynamic_ssl_server_credentials(
        _configuration(first),
        # The stubs do not allow None, which means "no change".
        _reloader(files),  # type: ignore[arg-type]
        require_client_authentication=options.tls_client_ca is not None,
    )


_OF_SERVERS = FileNames(authorities="--tls-client-ca")


def client_credentials(tls: ClientTLS) -> grpc.ChannelCredentials:
    """Return the credentials of a client. The files are read once: open a new channel to use new files.

    Raises:
        TLSFileError: a file is missing, unusable or does not match.
    """
    identity = _Files(tls.certificate, tls.key, tls.ca, tls.names).read()
    return grpc.ssl_channel_credentials(identity.authorities, identity.key, identity.certificate)


@dataclass(frozen=True, slots=True)
class _Files:
    certificate: Path | None
    key: Path | None
    authorities: Path | None
    names: FileNames

    def read(self) -> Identity:
        names = self.names
        if (self.certificate is None) != (self.key is None):
            given, missing = names.certificate, names.key
            if self.certificate is None:
                given, missing = missing, given
            raise TLSFileError(f"{given} needs {missing}: give both")
        certificate = _content(self.certificate, names.certificate)
        key = _content(self.key, names.key)
        authorities = _content(self.authorities, names.authorities)
        if self.certificate is not None and self.key is not None:
            _check_pair(self.certificate, self.key, names)
        if authorities is not None:
            _check_authorities(authorities, f"{names.authorities} {self.authorities}")
        return Identity(certificate, key, authorities)

    def stamp(self) -> tuple[tuple[int, int, int] | None, ...]:
        """Return a value that differs after a file was written, replaced or removed."""
        return tuple(
            file_stamp(path) for path in (self.certificate, self.key, self.authorities) if path is not None
        )


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that differs after a file was written or replaced; None: it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authorities
    )


def _reloader(files: _Files) -> Callable[[], grpc.ServerCertificateConfiguration | None]:
    """Return gRPC's callback for each handshake, on its own thread: returns new credentials, or None for no change."""
    seen = files.stamp()

    def reload() -> grpc.ServerCertificateConfiguration | None:
        nonlocal seen
        stamp = files.stamp()
        if stamp == seen:
            return None
        seen = stamp
        try:
            configuration = _configuration(files.read())
        except TLSFileError as error:
            log.warning("TLS files changed and are unusable; keeping the old ones", cause=str(error))
            return None
        log.info("TLS files changed and were read again", certificate=str(files.certificate))
        return configuration

    return reload


def _content(path: Path | None, flag: str) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise TLSFileError(f"{flag} {path}: {error.strerror}") from None


def _check_pair(certificate: Path, key: Path, names: FileNames) -> None:
    # PROTOCOL_TLS_SERVER checks no peer's certificate here: the context only serves to load and compare.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encrypted = False

    def no_password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        of_key, of_certificate = f"{names.key} {key}", f"{names.certificate} {certificate}"
        if encrypted:
            raise TLSFileError(f"{of_key} is encrypted: give one without a passphrase") from None
        if "MISMATCH" in str(error):
            raise TLSFileError(f"{of_key} is not the private key of {of_certificate}") from None
        if not _has_certificate(certificate):
            raise TLSFileError(f"{of_certificate} holds no PEM certificate") from None
        raise TLSFileError(f"{of_key} holds no PEM private key that can be used") from None


def _has_certificate(path: Path) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError):
        return False
    return True


def _check_authorities(pem: bytes, what: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError):
        raise TLSFileError(f"{what} holds no PEM certificate") from None
