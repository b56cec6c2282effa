"""The URL of an etcd cluster, taken apart: `etcd://user:password@host:port,host:port/path?name=value`.

What its path and its parameters mean is for those who read it. They also say where it was given, for messages, which
never have a password in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import parse_qsl, unquote

from rallypoint.rpc.endpoint import Endpoint, SettingError, parse_endpoint

DEFAULT_PORT = 2379
# The name of it, no password.
PASSWORD_VARIABLE = "RALLYPOINT_ETCD_PASSWORD"  # noqa: S105
CONTROL = re.compile(r"[\x00-\x20\x7f]")
"""A character that must be quoted in a URL."""

_NO_ALIASES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Parts:
    """Of a URL, all still quoted.

    Attributes:
        scheme: What is before the `://`.
        userinfo: What is before the @; empty: nothing.
        hosts: Separated by commas.
        path: With its slash; empty: there is none.
        query: What follows the `?`.
    """

    scheme: str
    userinfo: str
    hosts: str
    path: str
    query: str


def split_url(url: str, where: str) -> Parts:
    """Take a URL apart.

    Args:
        url: With a scheme.
        where: It was given, without its password.

    Raises:
        SettingError: It can't be told what is what in it; one line.
    """
    scheme, _, rest = url.partition("://")
    if CONTROL.search(url):
        raise SettingError(f"{where} has a space or control character in it: write it as %20")
    if "#" in rest:
        raise SettingError(f"{where} has a # in it: write it as %23")
    rest, _, query = rest.partition("?")
    authority, slash, path = rest.partition("/")
    if "@" in path or "@" in query:
        # What stands before it may be a part of a password, so none of it is taken for a host or a name.
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
    """Read `name=value&name=value`.

    Args:
        text: It.
        where: It was given.
        known: The names that there are.
        aliases: Other spellings of them.
        otherwise: Where other names belong; half a sentence.

    Raises:
        SettingError: It is not that; one line.
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
    """Read the members of a cluster: `host[:port][,...]`.

    Raises:
        SettingError: They are no endpoints, or one is there twice; one line.
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
    """User and password of what is before the @; each may be empty.

    Raises:
        SettingError: There is a colon and nothing behind it.
    """
    user, colon, password = text.partition(":")
    if colon and not password:
        raise SettingError(f"{where} has an empty password: leave the colon out, or give one")
    return unquote(user), unquote(password)


def complete_user(
    user: str, password: str, where: str, environment: Mapping[str, str], otherwise: str = ""
) -> tuple[str, str]:
    """User and password, the password from the environment where none was given; both empty: nobody.

    Args:
        user: As it was given.
        password: Likewise.
        where: They were given.
        environment: Has a password in RALLYPOINT_ETCD_PASSWORD.
        otherwise: How else one could be given; half a sentence.

    Raises:
        SettingError: There is one without the other; one line.
    """
    if not user:
        if password:
            raise SettingError(f"{where} has a password and no user before the @")
        # A variable that is set for another cluster is no mistake here.
        return "", ""
    password = password or environment.get(PASSWORD_VARIABLE, "")
    if not password:
        raise SettingError(f"{where} has user {user!r} and no password: set {PASSWORD_VARIABLE}{otherwise}")
    return user, password
