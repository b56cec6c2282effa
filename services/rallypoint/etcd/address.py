"""Where etcd is, and who we are to it, as one URL."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from rallypoint.etcd.url import CONTROL, complete_user, parse_hosts, parse_query, parse_userinfo, split_url
from rallypoint.rpc.endpoint import ClientTLS, Endpoint, FileNames, SettingError, without_password

DEFAULT_PREFIX = "/rallypoint"
EXPECTED = "expected etcd://[user@]host:port[,host:port...][/prefix][?ca=FILE&cert=FILE&key=FILE]"

_TLS_FILES = ("ca", "cert", "key")
_TLS_NAMES = FileNames("cert of the etcd URL", "key of the etcd URL", "ca of the etcd URL")
_SECONDS = ("request-timeout", "attempt-timeout")
_QUERY = (*_TLS_FILES, "user", "password-file", *_SECONDS)
# Longer ones would eat into what a transaction may hold, which has many keys.
_LONGEST_PREFIX = 256


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
        # An editor leaves a newline behind, which is no part of the password.
        password = path.read_text().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else "is no text"
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
