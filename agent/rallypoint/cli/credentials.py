"""`rallypoint tls init`, certificates for a trial of mutual TLS; `rallypoint token`, tokens for clients."""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from rallypoint.cli.main import LazyGroup
from rallypoint.cli.values import Text
from rallypoint.rpc.endpoint import Endpoint, EndpointError, SettingError, ip_address, listening_endpoint
from rallypoint.rpc.text import printable
from rallypoint.serving.options import Finite, SettingRefused
from rallypoint.serving.policy import Role

if TYPE_CHECKING:
    from cryptography import x509

_LOCAL = ("localhost", "127.0.0.1", "::1")
_MOST_DAYS = 3650
# RFC 5280, ub-common-name: characters.
_LONGEST_NAME = 64
# Clocks of the hosts may be behind the one of this machine by so much.
_CLOCK_SKEW = timedelta(hours=1)
_SPIFFE = "spiffe://"
# As the SPIFFE ID standard has it, with a path: its last segment names the files.
_SPIFFE_ID = re.compile(rf"{_SPIFFE}[a-z0-9._-]+(/(?!\.{{1,2}}(/|$))[A-Za-z0-9._-]+)+")


@click.command(
    cls=LazyGroup,
    lazy={
        "init": (
            "rallypoint.cli.credentials:init",
            "Make an authority, and certificates for a server and clients.",
        )
    },
)
def tls() -> None:
    """Make certificates for a trial of mutual TLS."""


# ---- Values of the command line.


class _Host(click.ParamType[str]):
    """Name or address of a host, as clients use it; returned without brackets."""

    name = "HOST"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        host = _host(str(value))
        address = None if host is None else ip_address(host)
        # With digits at its end it is no name (RFC 1123), but a mistyped address.
        if host is None or (address is None and host.rpartition(".")[2].isdigit()):
            self.fail(f"{value!r} is no host name and no address (give no port)", param, ctx)
        if address is not None and address.is_unspecified:
            self.fail(f"{value!r} is no address that clients connect to", param, ctx)
        return host


class _ClientName(click.ParamType[str]):
    """Name of a client: a DNS name or a SPIFFE ID."""

    name = "NAME"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Check the value."""
        name = str(value)
        valid = _SPIFFE_ID.fullmatch(name) if name.startswith(_SPIFFE) else _host(name) == name
        if not valid or ip_address(name) is not None:
            self.fail(
                f"{name!r} is no name for a client; expected one as in alice, alice.example.org or "
                f"{_SPIFFE}example.org/alice",
                param,
                ctx,
            )
        if len(name) > _LONGEST_NAME:
            self.fail(f"{name!r} is longer than {_LONGEST_NAME} characters", param, ctx)
        if _stem(name) in ("ca", "server"):
            self.fail(f"the files of {name!r} would be those of the {_stem(name)}", param, ctx)
        return name


def _host(text: str) -> str | None:
    """Return a host name without the final dot, or an address without brackets; None: it is neither."""
    try:
        endpoint = listening_endpoint(text, 0)
    except EndpointError:
        return None
    return None if endpoint.path is not None or "%" in endpoint.host else endpoint.host.removesuffix(".")


def _stem(client: str) -> str:
    """Return the name of a client's files, without suffix."""
    return client.rpartition("/")[2]


# ---- `rallypoint tls init`.


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("hosts", type=_Host(), nargs=-1, required=True, metavar="HOST...")
@click.option(
    "--client",
    "clients",
    type=_ClientName(),
    multiple=True,
    default=["client"],
    show_default=True,
    metavar="NAME",
    help="Name of a client, or its SPIFFE ID (spiffe://...); may be repeated.",
)
@click.option(
    "--days",
    type=click.IntRange(1, _MOST_DAYS),
    default=30,
    show_default=True,
    metavar="N",
    help="How long the certificates are valid.",
)
def init(*, folder: Path, hosts: tuple[str, ...], clients: tuple[str, ...], days: int) -> None:
    """Make in FOLDER an authority, a certificate for servers at each HOST, and one for each client.

    HOST is a name or an address with which clients connect; localhost is always included. All servers and agents of
    the trial share server.pem. Nothing is overwritten.
    """
    stems = [_stem(name) for name in clients]
    if twice := next((stem for stem in stems if stems.count(stem) > 1), None):
        raise click.BadParameter(f"two clients would have the files {twice}.pem", param_hint="--client")
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    names = tuple(dict.fromkeys((*hosts, *_LOCAL)))
    _write(folder, _trial_files(names, clients, now - _CLOCK_SKEW, end))
    click.echo(
        f"made in {folder}, valid until {end:%Y-%m-%d %H:%M} UTC:\n"
        "  ca.pem, ca.key: the authority; no server and no client needs ca.key\n"
        f"  server.pem, server.key: for servers and agents at {', '.join(names)}"
    )
    for name, stem in zip(clients, stems, strict=True):
        click.echo(f"  {stem}.pem, {stem}.key: for the client {name}")
    ca, own = shlex.quote(str(folder.absolute() / "ca.pem")), _pair(folder, "server")
    endpoint = Endpoint(hosts[0], 29400)
    any_address = "::" if ":" in hosts[0] else "0.0.0.0"  # noqa: S104 (clients need a certificate)
    click.echo(
        "Copy ca.pem, server.pem and server.key to each host, and a client's files with ca.pem to its user:\n"
        f"  rallypoint serve rendezvous --host {any_address} {own} --tls-client-ca {ca}\n"
        f"  rallypoint run --rdzv-endpoint {endpoint} --tls-ca {ca} {own} ...\n"
        f"  rallypoint status --rdzv-endpoint {endpoint} --tls-ca {ca} {_pair(folder, stems[0])}"
    )


def _pair(folder: Path, stem: str) -> str:
    """Return the flags for a certificate and its key."""
    path = folder.absolute() / stem
    return f"--tls-cert {shlex.quote(f'{path}.pem')} --tls-key {shlex.quote(f'{path}.key')}"


def _trial_files(
    hosts: Sequence[str], clients: Sequence[str], first: datetime, last: datetime
) -> dict[str, bytes]:
    """Return the content of each file by its name: a new authority, and its certificates with their keys.

    Args:
        first: when the certificates begin to be valid.
        last: when they expire.
    """
    # Loaded only here: cryptography takes a while to load.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.x509.oid import ExtendedKeyUsageOID  # noqa: PLC0415

    from rallypoint.rpc.run_secret import Authority, new_key, private_pem  # noqa: PLC0415

    def general_name(name: str) -> x509.GeneralName:
        if name.startswith(_SPIFFE):
            return x509.UniformResourceIdentifier(name)
        address = ip_address(name)
        return x509.DNSName(name) if address is None else x509.IPAddress(address)

    authority = Authority("rallypoint trial authority", new_key(), first, last)
    files = {"ca.pem": authority.root(_key_usage(of_authority=True)), "ca.key": private_pem(authority.key)}
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    for name, names, usages in [("server", hosts, both), *((each, [each], both[1:]) for each in clients)]:
        files[f"{_stem(name)}.pem"], files[f"{_stem(name)}.key"] = authority.issue(
            name,
            _key_usage(of_authority=False),
            x509.ExtendedKeyUsage(usages),
            x509.SubjectAlternativeName([general_name(each) for each in names]),
        )
    return files


def _key_usage(*, of_authority: bool) -> x509.KeyUsage:
    """Return the right to sign certificates, or else handshakes."""
    from cryptography import x509  # noqa: PLC0415

    return x509.KeyUsage(
        digital_signature=not of_authority,
        key_cert_sign=of_authority,
        crl_sign=of_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files, or none: keys with mode 0600, in a folder that is made with mode 0700.

    Raises:
        SettingRefused: One of them exists, or can't be written.
    """
    for path in (folder / name for name in files):
        if os.path.lexists(path):
            raise SettingRefused(
                f"{printable(str(path))} exists, and nothing is overwritten: give another folder"
            )
    written: list[Path] = []
    path = folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (folder / name for name in files):
            mode = 0o600 if path.suffix == ".key" else 0o644
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                written.append(path)
                file.write(files[path.name])
    except OSError as error:
        for each in written:
            each.unlink(missing_ok=True)
        raise SettingRefused(f"can't write {printable(str(path))}: {error.strerror}") from None


# ---- `rallypoint token`.


@click.command(
    cls=LazyGroup,
    lazy={
        "key": ("rallypoint.cli.credentials:make_key", "Make a key that signs tokens."),
        "issue": ("rallypoint.cli.credentials:issue_token", "Print a new token."),
        "inspect": ("rallypoint.cli.credentials:inspect_token", "Show the content of a token."),
    },
)
def token() -> None:
    """Make keys for tokens, issue and inspect tokens.

    A server with --token-keys serves a client with a token as the roles and runs in it permit.
    """


_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("key")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
def make_key(*, folder: Path) -> None:
    """Make in FOLDER a private key, token.key, and its public key for servers, token.pub.

    To replace a key, append the new token.pub to the --token-keys file of the servers, issue new tokens, and remove the
    old one from the file.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat  # noqa: PLC0415

    from rallypoint.rpc.run_secret import private_pem  # noqa: PLC0415

    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    _write(folder, {"token.key": private_pem(key), "token.pub": public})
    click.echo(
        f"made in {folder}: token.key, to issue tokens with, and token.pub, for servers:\n"
        f"  rallypoint token issue NAME --key {shlex.quote(str(folder.absolute() / 'token.key'))} --role observer\n"
        f"  rallypoint serve ... --token-keys {shlex.quote(str(folder.absolute() / 'token.pub'))}"
    )


@click.command("issue")
@click.argument("name", type=Text())
@click.option(
    "--key", type=_FILE, required=True, metavar="FILE", help="Private key (`rallypoint token key`)."
)
@click.option(
    "--role",
    "roles",
    type=click.Choice([role.value for role in Role]),
    multiple=True,
    required=True,
    help="Role of the client; may be repeated.",
)
@click.option(
    "--run",
    "runs",
    type=Text(),
    multiple=True,
    default=["*"],
    show_default=True,
    metavar="PATTERN",
    help="Runs for which it has the roles, as in train-*; may be repeated.",
)
@click.option(
    "--hours",
    type=Finite(0.01, 24.0 * _MOST_DAYS),
    default=24.0,
    show_default=True,
    metavar="N",
    help="How long the token is valid.",
)
def issue_token(*, name: str, key: Path, roles: Sequence[str], runs: Sequence[str], hours: float) -> None:
    """Print a token for the client NAME: save it in a file, for --token-file."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    from rallypoint.serving.tokens import Token, issue  # noqa: PLC0415

    try:
        private = load_pem_private_key(key.read_bytes(), None)
    except OSError as error:
        raise SettingRefused(f"cannot read --key {key}: {error.strerror}") from None
    except (ValueError, TypeError):
        private = None
    if not isinstance(private, Ed25519PrivateKey):
        raise SettingRefused(f"--key {key} holds no private Ed25519 key: `rallypoint token key` makes one")
    now = time.time()
    click.echo(issue(private, Token(name, frozenset(map(Role, roles)), runs, now + 3600 * hours), now))


@click.command("inspect")
@click.argument("file", type=click.File(), default="-")
@click.option(
    "--keys", type=_FILE, metavar="FILE", help="Also check it with these public keys, as a server does."
)
def inspect_token(*, file: TextIO, keys: Path | None) -> None:
    """Show the content of the token in FILE, or of the one on standard input."""
    from rallypoint.serving.tokens import InvalidToken, check, read_keys, unchecked  # noqa: PLC0415

    text = file.read().strip()
    try:
        kid, token_ = unchecked(text)
        click.echo(f"client   {printable(token_.name)}")
        click.echo(f"roles    {', '.join(sorted(token_.roles)) or 'none'}")
        click.echo(f"runs     {printable(', '.join(token_.runs)) or 'none'}")
        click.echo(f"expires  {datetime.fromtimestamp(token_.expires, UTC):%Y-%m-%d %H:%M:%S} UTC")
        click.echo(f"key      {printable(kid)}")
        if keys is not None:
            check(text, read_keys(keys))
            click.echo("valid")
    except InvalidToken as refused:
        raise SettingRefused(f"the token is not valid: {refused}") from None
    except SettingError as error:
        raise SettingRefused(str(error)) from None
