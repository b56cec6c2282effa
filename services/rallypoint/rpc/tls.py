"""How connections are secured: by TLS files, by a secret that both ends hold, or not at all.

Files are checked before use, so that errors name the wrong one; both ends read them again when they change.
"""

from __future__ import annotations

import ssl
from functools import partial
from pathlib import Path

import grpc

from rallypoint.rpc.endpoint import (
    CERTIFIED_NAME,
    SECRET_VARIABLE,
    ClientSecurity,
    ClientTLS,
    Endpoint,
    FileNames,
    Identity,
    Plaintext,
    RunSecret,
    ServerOptions,
    SettingError,
)
from rallypoint.rpc.live_file import LiveFile
from rallypoint.rpc.runtime_folder import user_secret


class TLSFileError(SettingError):
    """A TLS file cannot be read, is not valid, or does not match another. The message has file and flag."""


def transport(options: ServerOptions, endpoint: Endpoint) -> str:
    """Return how a server secures its connections, for people: `TLS`, `run secret`, `Unix socket` and so on."""
    if options.tls_cert is not None:
        return "TLS" if options.tls_client_ca is None else "mutual TLS"
    if endpoint.path is not None:
        return "Unix socket"
    if options.insecure:
        return "plaintext"
    return "run secret" if options.run_secret is not None else "secret of this user"


def server_credentials(options: ServerOptions, endpoint: Endpoint) -> grpc.ServerCredentials | None:
    """Return the credentials of a server.

    Args:
        options: the TLS files or the secret, and whether plaintext is allowed.
        endpoint: the address to listen on.

    Returns:
        None for plaintext and for a Unix socket without TLS files. The credentials follow their files: a handshake
        after a change reads all of them again, and keeps the old ones while the new ones are unusable (half written,
        for example).

    Raises:
        TLSFileError: a file is missing, unusable or does not match.
        SettingError: nothing would keep others on the network away, or flags contradict each other.
    """
    access, certified = options.access, options.tls_client_ca is not None
    if access.token_keys is not None and (options.insecure or endpoint.path is not None):
        raise SettingError(
            "--token-keys needs encrypted connections, by TLS files or a run secret: tokens can be read on others"
        )
    if access.token_keys is not None and certified and access.policy is None:
        raise SettingError(
            "--token-keys beside certificates of clients needs --policy: without one, a client with a certificate may "
            "call everything, and needs no token"
        )
    if access.policy is not None and not certified:
        raise SettingError(
            "--policy grants rights to the names in clients' certificates: the server must require them, by "
            "--tls-client-ca (an agent: --tls-ca with --tls-cert)"
        )
    if options.tls_cert is None and options.tls_key is None:
        if options.tls_client_ca is not None:
            raise SettingError(
                "--tls-client-ca requires certificates from clients, and needs --tls-cert and --tls-key"
            )
        if options.insecure and options.run_secret is not None:
            raise SettingError("--insecure and the run secret contradict each other: leave one of them out")
        if options.insecure or endpoint.path is not None:
            return None
        own = _identity(options.run_secret or _secret_for(endpoint, "serve"))
        assert own.key is not None
        assert own.certificate is not None
        return grpc.ssl_server_credentials(
            [(own.key, own.certificate)], root_certificates=own.authorities, require_client_auth=True
        )
    if endpoint.path is not None:
        raise SettingError(f"{endpoint} is a Unix socket, where TLS has no meaning: leave --tls-cert out")
    if options.insecure:
        raise SettingError("--insecure and --tls-cert contradict each other: leave one of them out")
    # Files of a server are read as those of a client; their options have other names.
    tls = ClientTLS(options.tls_client_ca, options.tls_cert, options.tls_key, names=_OF_SERVERS)
    files = tls_files(tls)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC for each handshake, on its own thread; None: no change."""
        return _configuration(files.content) if files.refresh() else None

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.content),
        renewed,  # type: ignore[arg-type]  # the stubs do not allow None
        require_client_authentication=options.tls_client_ca is not None,
    )


_OF_SERVERS = FileNames(authorities="--tls-client-ca")


class ClientCredentials:
    """What a client needs to open channels, as its security setting wants it."""

    def __init__(self, security: ClientSecurity) -> None:
        """Read the TLS files, if any.

        Raises:
            TLSFileError: a file is missing, unusable or does not match.
        """
        self._security = security
        self._files = tls_files(security) if isinstance(security, ClientTLS) else None
        path = security.token if isinstance(security, ClientTLS | RunSecret) else None
        self._token = None if path is None else grpc.metadata_call_credentials(_TokenFile(path))

    @property
    def of_files(self) -> bool:
        """Whether they come from TLS files, and change when these are replaced."""
        return self._files is not None

    def refresh(self) -> int:
        """Read the TLS files again if they have changed. Return how often that has happened."""
        if self._files is None:
            return 0
        self._files.refresh()
        return self._files.changes

    def of(self, endpoint: Endpoint) -> tuple[grpc.ChannelCredentials | None, str | None]:
        """Return the credentials for a channel, and the name that the server's certificate must have.

        Returns:
            No credentials for plaintext; no name: the endpoint's host.

        Raises:
            SettingError: the connection would be plaintext over a network.
        """
        if endpoint.path is not None or isinstance(self._security, Plaintext):
            return None, None  # the kernel decides who reaches a Unix socket
        bare = isinstance(self._security, ClientTLS) and not (self._security.ca or self._security.certificate)
        if self._files is not None and not (bare and endpoint.loopback):
            return self._with_token(channel_credentials(self._files.content)), None
        secret = self._security if isinstance(self._security, RunSecret) else _secret_for(endpoint, "speak")
        return self._with_token(channel_credentials(_identity(secret))), CERTIFIED_NAME

    def _with_token(self, credentials: grpc.ChannelCredentials) -> grpc.ChannelCredentials:
        return (
            credentials
            if self._token is None
            else grpc.composite_channel_credentials(credentials, self._token)
        )


class _TokenFile(grpc.AuthMetadataPlugin):
    """Sends the token of a file with each call."""

    def __init__(self, path: Path) -> None:
        """Read it. Raises TLSFileError."""
        self._token = LiveFile("token", [path], partial(_read_token, path))

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        """Called by gRPC for each call, on a thread of its own."""
        self._token.refresh()
        callback((("authorization", f"Bearer {self._token.content}"),), None)


def _read_token(path: Path) -> str:
    token = (_content(path, "--token-file") or b"").decode(errors="replace").strip()
    if not token or not token.isascii() or not token.isprintable():
        raise TLSFileError(f"--token-file {path} holds no token")
    return token


def _secret_for(endpoint: Endpoint, verb: str) -> RunSecret:
    """Return the secret for an endpoint when nothing was configured.

    Raises:
        SettingError: there is none, because the endpoint is on a network.
    """
    if not endpoint.loopback:
        raise SettingError(
            f"refusing to {verb} plaintext at {endpoint}, where others on the network can listen and connect: give all "
            f"hosts of the job the same {SECRET_VARIABLE}, or TLS files ({_TLS_FLAGS[verb]}), or --insecure where the "
            "network itself is trusted"
        )
    return user_secret()


_TLS_FLAGS = {"serve": "--tls-cert and --tls-key, an agent --tls-ca too", "speak": "--tls-ca"}


def _identity(secret: RunSecret) -> Identity:
    # Loaded only here: cryptography takes a while to load.
    from rallypoint.rpc.run_secret import identity_of  # noqa: PLC0415

    return identity_of(secret)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(identity.authorities, identity.key, identity.certificate)


def tls_files(tls: ClientTLS) -> LiveFile[Identity]:
    """Read the TLS files of a client, or those of a server under their own names. Raises TLSFileError."""
    paths = [path for path in (tls.certificate, tls.key, tls.ca) if path is not None]
    return LiveFile("TLS", paths, partial(_read_files, tls))


def _read_files(tls: ClientTLS) -> Identity:
    names = tls.names
    if (tls.certificate is None) != (tls.key is None):
        given, missing = names.certificate, names.key
        if tls.certificate is None:
            given, missing = missing, given
        raise TLSFileError(f"{given} needs {missing}: give both")
    certificate = _content(tls.certificate, names.certificate)
    key = _content(tls.key, names.key)
    authorities = _content(tls.ca, names.authorities)
    if tls.certificate is not None and tls.key is not None:
        _check_pair(tls.certificate, tls.key, names)
    if authorities is not None:
        _check_authorities(authorities, f"{names.authorities} {tls.ca}")
    return Identity(certificate, key, authorities)


def _configuration(identity: Identity) -> grpc.ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authorities
    )


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
