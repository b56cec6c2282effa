"""torch's etcd rendezvous, of its URL or of torchrun's flags, as what our own service over that etcd needs to know.

Nothing here looks at the machine or the network: the same text gives the same answer everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote

from rallypoint.agent.bounds import MOST_NODES, MOST_SECONDS
from rallypoint.etcd.address import DEFAULT_PORT, PASSWORD_VARIABLE, EtcdAddress
from rallypoint.serving.endpoint import Endpoint, parse_endpoint
from rallypoint.serving.settings import ClientTLS, SettingError

BACKENDS = ("etcd", "etcd-v2")
SCHEMES = ("etcd://", "etcds://")

EXPECTED = "expected etcd://HOST:PORT[,HOST:PORT...]/RUN_ID[?min_workers=N&max_workers=N&...]"

# Where torch's two backends keep what they know.
_PREFIXES = {"etcd": "/torchelastic/p2p", "etcd-v2": "/torch/elastic/rendezvous"}
# Seconds that the nodes of a round are waited for: of a URL, as torch documents it, and of flags, where torchrun
# itself adds what it has for its static backend. Its etcd-v2 does not read this.
_URL_TIMEOUT = "600"
_FLAGS_TIMEOUT = "900"
# torch's two backends spell these differently; what is meant is the same.
_ALIASES = {"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "cacert"}
_TLS_FILES = ("cert", "key", "cacert")
_NODES = ("min_workers", "max_workers")
_OF_ETCD = ("etcd_prefix", "protocol", *_TLS_FILES)
_OF_URL = (*_NODES, "timeout", "last_call_timeout", *_OF_ETCD)
# Every key in etcd begins with prefix and run; longer ones eat into what one transaction may hold.
_LONGEST_SPACE = 512
_CONTROL = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRendezvous:
    """Where a job meets that has nothing but an etcd.

    Attributes:
        address: The etcd; its prefix is the place of this run alone.
        run_id: Name of the run.
        nodes: Fewest and most nodes; None: nobody said.
        conf: Settings of the run, by the names of `--rdzv-conf`, and those that are not etcd's, as they were given.
    """

    address: EtcdAddress
    run_id: str
    nodes: tuple[int, int] | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


def is_etcd_url(endpoint: str) -> bool:
    """Whether an endpoint is meant as a URL of this kind, well-formed or not."""
    return endpoint.strip().startswith(SCHEMES)


def of_url(
    url: str,
    *,
    run_id: str = "",
    nodes: tuple[int, int] | None = None,
    conf: Mapping[str, str] | None = None,
    environment: Mapping[str, str],
) -> EtcdRendezvous:
    """Read `etcd://[user@]host[:port][,...]/run_id?name=value&...`; `etcds://` is the same with protocol=https.

    Args:
        url: It. Parameters are torch's: min_workers, max_workers (as many, if left out), timeout (600 s),
            last_call_timeout (30 s), etcd_prefix (/torchelastic/p2p), protocol (http), cert, key, cacert.
        run_id: What `--rdzv-id` says; empty: nothing.
        nodes: What `--nnodes` says; None: nothing.
        conf: What `--rdzv-conf` says beside it.
        environment: Has the user's password, in RALLYPOINT_ETCD_PASSWORD.

    Raises:
        SettingError: It is no such URL, or contradicts what is beside it; one line, without the password.
    """
    url = url.strip()
    shown = _shown(url)
    if _CONTROL.search(url) or "#" in url:
        raise SettingError(f"--rdzv-endpoint: {shown!r} has a space or # in it: write %20 or %23")
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    authority, _, path = rest.partition("/")
    where = f"--rdzv-endpoint: {shown!r}"
    given = _query(query, where)
    if scheme == "etcds" and given.setdefault("protocol", "https").lower() != "https":
        raise SettingError(f"{where} is https by its scheme, which contradicts protocol={given['protocol']}")
    own, others = _split(conf or {})
    for name, value in own.items():
        if given.setdefault(name, value) != value:
            raise SettingError(
                f"{where} has {name}={given[name]}, which contradicts --rdzv-conf {name}={value}: give one of them"
            )
    named = unquote(path.strip("/"))
    if run_id and named and run_id != named:
        raise SettingError(
            f"{where} names the run {named!r}, which contradicts --rdzv-id {run_id}: give one of them"
        )
    _seconds(given, others, where, _URL_TIMEOUT)
    return EtcdRendezvous(
        address=_address(
            authority, named or run_id, backend="etcd", given=given, where=where, environment=environment
        ),
        run_id=named or run_id,
        nodes=_nodes(given, nodes, where),
        conf=others,
    )


def of_flags(
    backend: str,
    endpoint: str,
    run_id: str,
    *,
    conf: Mapping[str, str] | None = None,
    environment: Mapping[str, str],
) -> EtcdRendezvous:
    """Read `--rdzv-backend etcd` or `etcd-v2`, and what torchrun takes beside it.

    Args:
        backend: `etcd` or `etcd-v2`.
        endpoint: `[user@]host[:port][,...]`; empty: this host, as with torchrun.
        run_id: What `--rdzv-id` says.
        conf: What `--rdzv-conf` says: the parameters of the URL, but for the numbers of nodes, and any other
            setting of a run.
        environment: Has the user's password, in RALLYPOINT_ETCD_PASSWORD.

    Raises:
        SettingError: It can't be so; one line, without the password.
    """
    own, others = _split(conf or {})
    for name in _NODES:
        if name in others:
            raise SettingError(
                f"--rdzv-conf: {name} is a parameter of the etcd:// URL; here --nnodes MIN:MAX says it"
            )
    if backend == "etcd":
        _seconds(own, others, "--rdzv-conf", _FLAGS_TIMEOUT)
    elif "timeout" in own:
        others["timeout"] = own["timeout"]  # which no rendezvous but torch's older one has
    where = f"--rdzv-endpoint: {_shown(endpoint)!r}"
    return EtcdRendezvous(
        address=_address(
            endpoint.strip() or "localhost",
            run_id,
            backend=backend,
            given=own,
            where=where,
            environment=environment,
        ),
        run_id=run_id,
        conf=others,
    )


def _shown(url: str) -> str:
    """Without the password."""
    return re.sub(r"^([^/]*//)?([^:@/?]*):[^/]*@", r"\1\2:***@", url)


def _query(text: str, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text))
    except ValueError:
        raise SettingError(f"{where}: what follows the ? is not name=value&name=value") from None
    for key, value in pairs:
        name = _ALIASES.get(key, key)
        if name not in _OF_URL:
            raise SettingError(
                f"{where} has the parameter {key!r}, expected one of {', '.join(_OF_URL)}; other settings of a run go "
                "into --rdzv-conf"
            )
        if not value.strip():
            raise SettingError(f"{where} has {key} without a value: give one, or leave it out")
        if found.setdefault(name, value.strip()) != value.strip():
            raise SettingError(f"{where} has {name} twice, as {found[name]} and {value}: give it once")
    return found


def _split(conf: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What `--rdzv-conf` says of etcd and of torch's timeout, and the rest."""
    own: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in conf.items():
        name = _ALIASES.get(key, key)
        if name != "timeout" and name not in _OF_ETCD:
            others[key] = value
        elif own.setdefault(name, value) != value:
            raise SettingError(
                f"--rdzv-conf: {key}={value} contradicts {name}={own[name]}, which is the same: give one of them"
            )
    return own, others


def _seconds(given: Mapping[str, str], conf: dict[str, str], where: str, timeout: str) -> None:
    """Put torch's times where our settings have them."""
    for name, ours, least in (("timeout", "join_timeout", 0.001), ("last_call_timeout",) * 2 + (0.0,)):
        if name in given:
            text = given[name]
            if not least <= _number(text) <= MOST_SECONDS:
                raise SettingError(
                    f"{where} has {name}={text}, expected a number of seconds, {least:g} to {MOST_SECONDS}"
                )
            if conf.setdefault(ours, text) != text:
                raise SettingError(
                    f"{where}: {name}={text} contradicts --rdzv-conf {ours}={conf[ours]}, which is the same: give one "
                    "of them"
                )
    conf.setdefault("join_timeout", timeout)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # which is within no bounds


def _nodes(given: Mapping[str, str], flag: tuple[int, int] | None, where: str) -> tuple[int, int] | None:
    if "min_workers" not in given:
        if "max_workers" in given:
            raise SettingError(f"{where} has max_workers without min_workers: give both, or only min_workers")
        return flag
    least = _count(given, "min_workers", where)
    most = _count(given, "max_workers", where) if "max_workers" in given else least
    if most < least:
        raise SettingError(f"{where} has max_workers={most}, which is less than min_workers={least}")
    if flag is not None and flag != (least, most):
        raise SettingError(
            f"{where} has {least} to {most} workers, which contradicts --nnodes {flag[0]}:{flag[1]}: these are nodes "
            "too; give one of them"
        )
    return least, most


def _count(given: Mapping[str, str], name: str, where: str) -> int:
    text = given[name]
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MOST_NODES):
        raise SettingError(f"{where} has {name}={text}, expected a number of nodes, 1 to {MOST_NODES}")
    return int(text)


def _address(
    authority: str,
    run_id: str,
    *,
    backend: str,
    given: Mapping[str, str],
    where: str,
    environment: Mapping[str, str],
) -> EtcdAddress:
    if not run_id:
        raise SettingError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job: what the last job "
            "of that name left in etcd is there for two hours"
        )
    userinfo, _, hosts = authority.rpartition("@")
    user, password = _user(userinfo, where, environment)
    return EtcdAddress(
        endpoints=_endpoints(hosts, where),
        prefix=_space(given.get("etcd_prefix", _PREFIXES[backend]), run_id),
        tls=_tls(given),
        user=user,
        password=password,
    )


def _endpoints(hosts: str, where: str) -> tuple[Endpoint, ...]:
    found: list[Endpoint] = []
    for text in hosts.split(","):
        host = text.strip()
        if not host:
            raise SettingError(f"{where} has no host; {EXPECTED}")
        has_port = ":" in host and not host.endswith("]")
        try:
            endpoint = parse_endpoint(host if has_port else f"{host}:{DEFAULT_PORT}")
        except SettingError as error:
            raise SettingError(f"{where}: {error}") from None
        if endpoint in found:
            raise SettingError(f"{where} names {endpoint} twice: give each member of the etcd cluster once")
        found.append(endpoint)
    return tuple(found)


def _user(userinfo: str, where: str, environment: Mapping[str, str]) -> tuple[str, str]:
    if not userinfo:
        # A variable that is set for another cluster is no mistake here.
        return "", ""
    name, _, password = userinfo.partition(":")
    user, password = unquote(name), unquote(password) or environment.get(PASSWORD_VARIABLE, "")
    if not user or not password:
        missing = f"password: set {PASSWORD_VARIABLE}" if user else "user before the @"
        raise SettingError(f"{where} has no {missing}")
    return user, password


def _space(prefix: str, run_id: str) -> str:
    """Where in etcd a run is. A slash in its name is no step down: that could lead into the middle of another run."""
    inner = prefix.strip().strip("/")
    if "//" in inner or _CONTROL.search(inner):
        raise SettingError(
            f"etcd_prefix={prefix!r} has a space or an empty part in it, expected a path as in /jobs"
        )
    space = (f"/{inner}" if inner else "") + f"/{quote(run_id, safe='')}"
    if len(space.encode()) > _LONGEST_SPACE:
        raise SettingError(
            f"etcd_prefix and the run's name come to {len(space.encode())} bytes in etcd, expected at most "
            f"{_LONGEST_SPACE}: shorten one of them"
        )
    return space


def _tls(given: Mapping[str, str]) -> ClientTLS | None:
    protocol = given.get("protocol", "http").lower()
    if protocol not in ("http", "https"):
        raise SettingError(f"protocol={given['protocol']!r} of etcd is neither http nor https")
    files = {name: Path(given[name]) for name in _TLS_FILES if name in given}
    if protocol == "http":
        if files:
            raise SettingError(
                f"{next(iter(files))} is for etcd with TLS, which contradicts protocol=http: give protocol=https, or "
                "leave it out"
            )
        return None
    if "key" in files and "cert" not in files:
        raise SettingError("key is that of cert, which is missing: give both, or leave key out")
    # One file may hold both, as torch's client has it where only `cert` is given.
    return ClientTLS(files.get("cacert"), files.get("cert"), files.get("key", files.get("cert")))
