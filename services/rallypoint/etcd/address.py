"""Where etcd is, and who we are to it, as one URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, unquote

from rallypoint.serving.endpoint import Endpoint, parse_endpoint
from rallypoint.serving.settings import ClientTLS, SettingError

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "/rallypoint"
# The name of it, no password.
PASSWORD_VARIABLE = "RALLYPOINT_ETCD_PASSWORD"  # noqa: S105
EXPECTED = "expected etcd://[user@]host:port[,host:port...][/prefix][?ca=FILE&cert=FILE&key=FILE]"

_TLS_FILES = ("ca", "cert", "key")
_SECONDS = ("request-timeout", "attempt-timeout")
_QUERY = (*_TLS_FILES, "user", "password-file", *_SECONDS)
# Longer ones would eat into what a transaction may hold, which has many keys.
_LONGEST_PREFIX = 256
_CONTROL = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where etcd is, and who we are to it.

    Attributes:
        endpoints: Members of one cluster, at least one. All of them, so that it doesn't matter which is down.
        prefix: Of all keys; begins with a slash and doesn't end with one.
        tls: None for plaintext.
        user: Empty: none.
        password: Of that user. Never shown.
        request_timeout: Seconds that a request may take over all endpoints. Longer rides out slower elections;
            shorter tells callers sooner that there is no etcd.
        attempt_timeout: Seconds that it may take at one endpoint. Longer suits slow disks; shorter gets away
            sooner from a member that hangs.
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
    """Reads the URL of an etcd cluster.

    `etcd://[user[:password]@]host[:port][,host[:port]...][/prefix][?name=value&...]`. `etcds://` is TLS, with the
    public roots unless `ca` names others; so is any URL with a `ca` or a `cert`. Names: `ca`, `cert`, `key`
    (PEM files), `user`, `password-file`, `request-timeout`, `attempt-timeout` (seconds). The password is that
    of the URL, or of the file, or of RALLYPOINT_ETCD_PASSWORD, in this order; in the URL it stands in `ps`.

    Raises:
        SettingError: It is no such URL. The message never has the password in it.
    """
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in ("etcd", "etcds"):
        raise SettingError(f"{_shown(url)!r} is not the URL of an etcd cluster: {EXPECTED}")
    shown = _shown(url)
    if _CONTROL.search(url):
        raise SettingError(f"etcd URL {shown!r} has a space or control character in it: write it as %20")
    if "#" in rest:
        raise SettingError(f"etcd URL {shown!r} has a # in it: write it as %23")
    rest, _, query_text = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or "@" in query_text:
        # What stands before it may be a part of a password, so none of it is taken for a host or a name.
        raise SettingError(
            f"etcd URL {shown!r} has an @ behind a / or ?: in a user, password or path write / as %2F, ? as %3F"
            " and @ as %40"
        )
    userinfo, _, hosts = authority.rpartition("@")
    query = _query(query_text, shown)
    user, password = _user(userinfo, query, environment, shown)
    return EtcdAddress(
        endpoints=_endpoints(hosts, shown),
        prefix=_prefix(slash + path, shown),
        tls=_tls(scheme, query, shown),
        user=user,
        password=password,
        **{name.replace("-", "_"): _seconds(name, query[name], shown) for name in _SECONDS if name in query},
    )


def _shown(url: str) -> str:
    """The URL without its password."""
    return re.sub(r"^([^/]*//)?([^:@/?]*):.*@", r"\1\2:***@", url)


def _query(text: str, shown: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise SettingError(f"etcd URL {shown!r}: what follows the ? is not name=value&name=value") from None
    for name, value in pairs:
        if name not in _QUERY:
            raise SettingError(f"etcd URL {shown!r} has {name!r}, expected one of {', '.join(_QUERY)}")
        if name in found:
            raise SettingError(f"etcd URL {shown!r} has {name!r} twice: give it once")
        if not value:
            raise SettingError(f"etcd URL {shown!r} has {name!r} without a value: give one or leave it out")
        found[name] = value
    return found


def _endpoints(hosts: str, shown: str) -> tuple[Endpoint, ...]:
    found: list[Endpoint] = []
    for text in hosts.split(","):
        if not text:
            raise SettingError(f"etcd URL {shown!r} has an empty host: {EXPECTED}")
        has_port = text.rpartition(":")[2] if ":" in text and not text.endswith("]") else ""
        try:
            endpoint = parse_endpoint(text if has_port or text.endswith(":") else f"{text}:{DEFAULT_PORT}")
        except SettingError as error:
            raise SettingError(f"etcd URL {shown!r}: {error}") from None
        if endpoint in found:
            raise SettingError(f"etcd URL {shown!r} names {endpoint} twice: give each member once")
        found.append(endpoint)
    return tuple(found)


def _prefix(path: str, shown: str) -> str:
    prefix = unquote(path).rstrip("/")
    if not prefix:
        return DEFAULT_PREFIX
    if "//" in prefix or _CONTROL.search(prefix) or len(prefix.encode()) > _LONGEST_PREFIX:
        raise SettingError(
            f"etcd URL {shown!r} has prefix {prefix!r}, expected a path of at most {_LONGEST_PREFIX} bytes"
            " without spaces and empty parts, as in /rallypoint"
        )
    return prefix


def _user(
    userinfo: str, query: Mapping[str, str], environment: Mapping[str, str], shown: str
) -> tuple[str, str]:
    name, colon, password = userinfo.partition(":")
    user, password = unquote(name), unquote(password)
    if "user" in query:
        if user:
            raise SettingError(f"etcd URL {shown!r} has a user before the @ and one in the query: give one")
        user = query["user"]
    if colon and not password:
        raise SettingError(f"etcd URL {shown!r} has an empty password: leave the colon out, or give one")
    if "password-file" in query:
        if password:
            raise SettingError(f"etcd URL {shown!r} has a password and a password-file: give one of them")
        password = _password_in(Path(query["password-file"]), shown)
    password = password or environment.get(PASSWORD_VARIABLE, "")
    if not user:
        if colon or "password-file" in query:
            raise SettingError(f"etcd URL {shown!r} has a password and no user: {EXPECTED}")
        # A variable that is set for another cluster is no mistake here.
        return "", ""
    if not password:
        raise SettingError(
            f"etcd URL {shown!r} has user {user!r} and no password: set {PASSWORD_VARIABLE}, or give"
            " password-file=FILE"
        )
    return user, password


def _password_in(path: Path, shown: str) -> str:
    try:
        # An editor leaves a newline behind, which is no part of the password.
        password = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is no text"
        raise SettingError(f"etcd URL {shown!r}: password-file {path}: {cause}") from None
    if not password:
        raise SettingError(f"etcd URL {shown!r}: password-file {path} is empty")
    return password


def _tls(scheme: str, query: Mapping[str, str], shown: str) -> ClientTLS | None:
    files = {name: Path(query[name]) for name in _TLS_FILES if name in query}
    if ("cert" in files) != ("key" in files):
        given, missing = ("cert", "key") if "cert" in files else ("key", "cert")
        raise SettingError(f"etcd URL {shown!r} has {given!r} without {missing!r}: give both")
    if scheme == "etcd" and not files:
        return None
    return ClientTLS(files.get("ca"), files.get("cert"), files.get("key"))


def _seconds(name: str, text: str, shown: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 600:
        raise SettingError(f"etcd URL {shown!r} has {name}={text}, expected seconds from 0.01 to 600")
    return seconds
