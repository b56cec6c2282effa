"""The URL of an etcd cluster, parsed: `etcd://user:password@host:port,host:port/path?name=value`.

Callers define the meaning of its path and its parameters. They also pass `where`, the source of the URL for messages,
which never contain a password.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote

from rallypoint.rpc.endpoint import (
    ClientTLS,
    Endpoint,
    FileNames,
    SettingError,
    parse_endpoint,
    without_password,
)
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.tls import channel_credentials, tls_files

DEFAULT_PORT = 2379
# The name of the variable, not a password.
PASSWORD_VARIABLE = "RALLYPOINT_ETCD_PASSWORD"  # noqa: S105
CONTROL = re.compile(r"[\x00-\x20\x7f]")
"""A character that must be quoted in a URL."""

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a URL, all still quoted; an absent one is empty. The path has its slash, commas separate the hosts."""

    scheme: str
    userinfo: str
    hosts: str
    path: str
    query: str


def split_url(url: str, where: str) -> Parts:
    """Split a URL into its parts.

    Args:
        url: With a scheme.
        where: Source of the URL for messages, without its password.

    Raises:
        SettingError: Its parts cannot be distinguished; one line.
    """
    scheme, _, rest = url.partition("://")
    if CONTROL.search(url):
        raise SettingError(f"{where} has a space or control character in it: write it as %20")
    if "#" in rest:
        raise SettingError(f"{where} has a # in it: write it as %23")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or "@" in query:
        # The text before it may be a part of a password, so none of it may be used as a host or a name.
        raise SettingError(
            f"{where} has an @ behind a / or ?: in a user, password or path write / as %2F, ? as %3F and @ as %40"
        )
    userinfo, _, hosts = authority.rpartition("@")
    return Parts(scheme, userinfo, hosts, slash + path, query)


def parse_query(
    text: str,
    where: str,
    known: Sequence[str],
    *,
    aliases: Mapping[str, str] = _NO_ALIASES,
    otherwise: str = "",
) -> dict[str, str]:
    """Parse `name=value&name=value`.

    Args:
        text: The query.
        where: Source of the query for messages.
        known: The valid names.
        aliases: Other spellings of them.
        otherwise: Hint for other names; half a sentence.

    Raises:
        SettingError: The query is not valid; one line.
    """
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise SettingError(f"{where}: what follows the ? is not name=value&name=value") from None
    for key, value in pairs:
        name = aliases.get(key, key)
        if name not in known:
            raise SettingError(
                f"{where} has the parameter {key!r}, expected one of {', '.join(known)}{otherwise}"
            )
        if not value.strip():
            raise SettingError(f"{where} has {key} without a value: give one, or leave it out")
        if found.setdefault(name, value.strip()) != value.strip():
            raise SettingError(f"{where} has {name} twice, as {found[name]} and {value}: give it once")
    return found


def parse_hosts(hosts: str, where: str, expected: str) -> tuple[Endpoint, ...]:
    """Parse the members of a cluster: `host[:port][,...]`.

    Raises:
        SettingError: They are not endpoints, or one occurs twice; one line.
    """
    found: list[Endpoint] = []
    for text in hosts.split(","):
        host = text.strip()
        if not host:
            raise SettingError(f"{where} has an empty host: {expected}")
        has_port = ":" in host and not host.endswith("]")
        try:
            endpoint = parse_endpoint(host if has_port else f"{host}:{DEFAULT_PORT}")
        except SettingError as error:
            raise SettingError(f"{where}: {error}") from None
        if endpoint in found:
            raise SettingError(f"{where} names {endpoint} twice: give each member of the cluster once")
        found.append(endpoint)
    return tuple(found)


def parse_userinfo(text: str, where: str) -> tuple[str, str]:
    """Return the user and password of the text before the @; each may be empty.

    Raises:
        SettingError: There is a colon and no password after it.
    """
    user, colon, password = text.partition(":")
    if colon and not password:
        raise SettingError(f"{where} has an empty password: leave the colon out, or give one")
    return unquote(user), unquote(password)


def complete_user(
    user: str, password: str, where: str, environment: Mapping[str, str], otherwise: str = ""
) -> tuple[str, str]:
    """Return user and password, the password from the environment if none was given; both empty: no user.

    Args:
        user: As given.
        password: As given.
        where: Their source, for messages.
        environment: May have a password in RALLYPOINT_ETCD_PASSWORD.
        otherwise: Other ways to give a password; half a sentence.

    Raises:
        SettingError: There is one without the other; one line.
    """
    if not user:
        if password:
            raise SettingError(f"{where} has a password and no user before the @")
        # A variable that is set for another cluster is not a mistake here.
        return "", ""
    password = password or environment.get(PASSWORD_VARIABLE, "")
    if not password:
        raise SettingError(f"{where} has user {user!r} and no password: set {PASSWORD_VARIABLE}{otherwise}")
    return user, password


# ---- The address of etcd and our user, as one URL.


DEFAULT_PREFIX = "/rallypoint"
EXPECTED = "expected etcd://[user@]host:port[,host:port...][/prefix][?ca=FILE&cert=FILE&key=FILE]"

_TLS_FILES = ("ca", "cert", "key")
_TLS_NAMES = FileNames("cert of the etcd URL", "key of the etcd URL", "ca of the etcd URL")
_SECONDS = ("request-timeout", "attempt-timeout")
_QUERY = (*_TLS_FILES, "user", "password-file", *_SECONDS)
# Longer ones would use up the bytes of a transaction, which has many keys.
_LONGEST_PREFIX = 256


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """The address of etcd and our user.

    Attributes:
        endpoints: Members of one cluster, at least one. Give all of them, so that any of them may be down.
        prefix: Prefix of all keys; begins with a slash and does not end with one.
        tls: None for plaintext.
        user: Empty: none.
        password: Of that user. Never shown.
        request_timeout: Seconds for a request over all endpoints. Longer survives slower elections; shorter gives
            callers an earlier error if there is no etcd.
        attempt_timeout: Seconds for a request at one endpoint. Longer suits slow disks; shorter leaves a member
            that hangs sooner.
    """

    endpoints: tuple[Endpoint, ...]
    prefix: str = DEFAULT_PREFIX
    tls: ClientTLS | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    request_timeout: float = 5.0
    attempt_timeout: float = 2.0

    def __str__(self) -> str:
        scheme = "etcd" if self.tls is None else "etcds"
        user = f"{self.user}@" if self.user else ""
        return f"{scheme}://{user}{','.join(str(each) for each in self.endpoints)}{self.prefix}"


def parse_address(url: str, environment: Mapping[str, str] = os.environ) -> EtcdAddress:
    """Parse the URL of an etcd cluster.

    `etcd://[user[:password]@]host[:port][,host[:port]...][/prefix][?name=value&...]`. `etcds://` is TLS, with the
    public roots unless `ca` names others; so is any URL with a `ca` or a `cert`. Names: `ca`, `cert`, `key`
    (PEM files), `user`, `password-file`, `request-timeout`, `attempt-timeout` (seconds). The password is that
    of the URL, or of the file, or of RALLYPOINT_ETCD_PASSWORD, in this order; in the URL, `ps` shows it.

    Raises:
        SettingError: It is not such a URL. The message never contains the password.
    """
    scheme, separator, _ = url.partition("://")
    shown = without_password(url)
    if not separator or scheme not in ("etcd", "etcds"):
        raise SettingError(f"{shown!r} is not the URL of an etcd cluster: {EXPECTED}")
    where = f"etcd URL {shown!r}"
    parts = split_url(url, where)
    query = parse_query(parts.query, where, _QUERY)
    user, password = _user(parts.userinfo, query, environment, where)
    return EtcdAddress(
        endpoints=parse_hosts(parts.hosts, where, EXPECTED),
        prefix=_prefix(parts.path, where),
        tls=_tls(scheme, query, where),
        user=user,
        password=password,
        **{name.replace("-", "_"): _seconds(name, query[name], where) for name in _SECONDS if name in query},
    )


def _prefix(path: str, where: str) -> str:
    prefix = unquote(path).rstrip("/")
    if not prefix:
        return DEFAULT_PREFIX
    if "//" in prefix or CONTROL.search(prefix) or len(prefix.encode()) > _LONGEST_PREFIX:
        raise SettingError(
            f"{where} has prefix {prefix!r}, expected a path of at most {_LONGEST_PREFIX} bytes"
            " without spaces and empty parts, as in /rallypoint"
        )
    return prefix


def _user(
    userinfo: str, query: Mapping[str, str], environment: Mapping[str, str], where: str
) -> tuple[str, str]:
    user, password = parse_userinfo(userinfo, where)
    if "user" in query:
        if user:
            raise SettingError(f"{where} has a user before the @ and one in the query: give one")
        user = query["user"]
    if "password-file" in query:
        if password:
            raise SettingError(f"{where} has a password and a password-file: give one of them")
        password = _password_in(Path(query["password-file"]), where)
    return complete_user(user, password, where, environment, ", or give password-file=FILE")


def _password_in(path: Path, where: str) -> str:
    try:
        # An editor adds a newline at the end, which is no part of the password.
        password = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is not a text file"
        raise SettingError(f"{where}: password-file {path}: {cause}") from None
    if not password:
        raise SettingError(f"{where}: password-file {path} is empty")
    return password


def _tls(scheme: str, query: Mapping[str, str], where: str) -> ClientTLS | None:
    files = {name: Path(query[name]) for name in _TLS_FILES if name in query}
    if ("cert" in files) != ("key" in files):
        given, missing = ("cert", "key") if "cert" in files else ("key", "cert")
        raise SettingError(f"{where} has {given!r} without {missing!r}: give both")
    if scheme == "etcd" and not files:
        return None
    return ClientTLS(files.get("ca"), files.get("cert"), files.get("key"), names=_TLS_NAMES)


def _seconds(name: str, text: str, where: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 600:
        raise SettingError(f"{where} has {name}={text}, expected seconds from 0.01 to 600")
    return seconds


# ---- TLS credentials from files that may be replaced at run time, as issuers of short-lived certificates do.


log = get_logger(__name__)


class Credentials:
    """The credentials for connections. gRPC cannot exchange those of a channel, so `current` is for the next one."""

    def __init__(self, tls: ClientTLS | None) -> None:
        """`tls`: None for plaintext.

        Raises:
            TLSFileError: A file is missing, unusable or does not match.
        """
        self.names = tls.names if tls is not None else FileNames()
        """Names of the files in messages."""
        self._files = None if tls is None else tls_files(tls)
        self.current = None if self._files is None else channel_credentials(self._files.content)

    def refresh(self) -> None:
        """Read the files again if they were replaced; unusable files (half written, for example) change nothing."""
        if self._files is not None and self._files.refresh():
            self.current = channel_credentials(self._files.content)
