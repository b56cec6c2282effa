"""torch's etcd rendezvous, of its URL or of torchrun's flags, as what our own service over that etcd needs to know.

Nothing here looks at the machine or the network: the same text gives the same answer everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from rallypoint.agent.config.settings import MOST_NODES, MOST_SECONDS
from rallypoint.etcd.endpoint import (
    CONTROL,
    EtcdAddress,
    complete_user,
    parse_hosts,
    parse_query,
    parse_userinfo,
    split_url,
)
from rallypoint.rpc.endpoint import ClientTLS, FileNames, SettingError, without_password

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


@dataclass(frozen=True, slots=True)
class _EtcdParameters:
    """Torch's parameters of etcd and of its times, and where each was given, for messages.

    Attributes:
        values: By their names.
        spelled: How those are spelled in `--rdzv-conf` that are not in the URL.
        endpoint: `--rdzv-endpoint` and what it says, without a password.
    """

    values: Mapping[str, str]
    spelled: Mapping[str, str]
    endpoint: str

    def where(self, name: str) -> str:
        """Where a parameter was given: a flag, and what it says if that is the endpoint."""
        return "--rdzv-conf" if name in self.spelled else self.endpoint

    def called(self, name: str) -> str:
        """What a parameter is called where it was given."""
        spelled = self.spelled.get(name)
        return f"--rdzv-conf {spelled}" if spelled else f"{name} of the --rdzv-endpoint URL"


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
    where = f"--rdzv-endpoint: {without_password(url)!r}"
    parts = split_url(url, where)
    values = parse_query(
        parts.query,
        where,
        _OF_URL,
        aliases=_ALIASES,
        otherwise="; other settings of a run go into --rdzv-conf",
    )
    own, others = _split(conf or {})
    spelled = {_ALIASES.get(key, key): key for key in conf or {} if _ALIASES.get(key, key) not in values}
    for name, value in own.items():
        if values.setdefault(name, value) != value:
            raise SettingError(
                f"{where} has {name}={values[name]}, which contradicts --rdzv-conf {name}={value}: give one of them"
            )
    if parts.scheme == "etcds" and values.setdefault("protocol", "https").lower() != "https":
        raise SettingError(f"{where} is https by its scheme, which contradicts protocol={values['protocol']}")
    given = _EtcdParameters(values, spelled, where)
    named = unquote(parts.path.strip("/"))
    if run_id and named and run_id != named:
        raise SettingError(
            f"{where} names the run {named!r}, which contradicts --rdzv-id {run_id}: give one of them"
        )
    _seconds(given, others, _URL_TIMEOUT)
    return EtcdRendezvous(
        address=_address(
            parts.userinfo, parts.hosts, _space(given, _PREFIXES["etcd"], named or run_id), given, environment
        ),
        run_id=named or run_id,
        nodes=_nodes(values, nodes, where),
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
    where = f"--rdzv-endpoint: {without_password(endpoint)!r}"
    if "://" in endpoint or "/" in endpoint.rpartition("@")[2]:
        raise SettingError(f"{where} has a /: expected [USER@]HOST[:PORT], or etcd://HOST:PORT/RUN_ID")
    given = _EtcdParameters(own, {_ALIASES.get(key, key): key for key in conf or {}}, where)
    if backend == "etcd":
        _seconds(given, others, _FLAGS_TIMEOUT)
    elif "timeout" in own:
        others["timeout"] = own["timeout"]  # which no rendezvous but torch's older one has
    userinfo, _, hosts = (endpoint.strip() or "localhost").rpartition("@")
    return EtcdRendezvous(
        address=_address(userinfo, hosts, _space(given, _PREFIXES[backend], run_id), given, environment),
        run_id=run_id,
        conf=others,
    )


def _split(conf: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What `--rdzv-conf` says of etcd and of torch's timeout, and the rest."""
    own: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in conf.items():
        name = _ALIASES.get(key, key)
        if name in _NODES:
            raise SettingError(
                f"--rdzv-conf: {name} is a parameter of the etcd:// URL; as a flag it is --nnodes MIN:MAX"
            )
        if name != "timeout" and name not in _OF_ETCD:
            others[key] = value
        elif own.setdefault(name, value) != value:
            raise SettingError(
                f"--rdzv-conf: {key}={value} contradicts {name}={own[name]}, which is the same: give one of them"
            )
    return own, others


def _seconds(given: _EtcdParameters, conf: dict[str, str], timeout: str) -> None:
    """Put torch's times where our settings have them."""
    for name, ours, least in (("timeout", "join_timeout", 0.001), ("last_call_timeout",) * 2 + (0.0,)):
        if name in given.values:
            text, where = given.values[name], given.where(name)
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
    userinfo: str, hosts: str, space: str, given: _EtcdParameters, environment: Mapping[str, str]
) -> EtcdAddress:
    user, password = complete_user(*parse_userinfo(userinfo, given.endpoint), given.endpoint, environment)
    return EtcdAddress(
        endpoints=parse_hosts(hosts, given.endpoint, EXPECTED),
        prefix=space,
        tls=_tls(given),
        user=user,
        password=password,
    )


def _space(given: _EtcdParameters, default: str, run_id: str) -> str:
    """Where in etcd a run is. A slash in its name is no step down: that could lead into the middle of another run."""
    if not run_id:
        raise SettingError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job: what the last job "
            "of that name left in etcd is there for two hours"
        )
    prefix = given.values.get("etcd_prefix", default)
    inner = prefix.strip().strip("/")
    if "//" in inner or CONTROL.search(inner):
        raise SettingError(
            f"{given.where('etcd_prefix')} has etcd_prefix={prefix!r} with a space or an empty part in it, expected a "
            "path as in /jobs"
        )
    space = (f"/{inner}" if inner else "") + f"/{quote(run_id, safe='')}"
    if len(space.encode()) > _LONGEST_SPACE:
        raise SettingError(
            f"{given.where('etcd_prefix')}: etcd_prefix and the run's name come to {len(space.encode())} bytes in "
            f"etcd, expected at most {_LONGEST_SPACE}: shorten one of them"
        )
    return space


def _tls(given: _EtcdParameters) -> ClientTLS | None:
    protocol = given.values.get("protocol", "http")
    if protocol.lower() not in ("http", "https"):
        raise SettingError(
            f"{given.where('protocol')} has protocol={protocol!r} for etcd, expected http or https"
        )
    files = {name: Path(given.values[name]) for name in _TLS_FILES if name in given.values}
    if protocol.lower() == "http":
        if files:
            raise SettingError(
                f"{given.called(next(iter(files)))} is for etcd with TLS, which contradicts protocol=http: give "
                "protocol=https, or leave it out"
            )
        return None
    if "key" in files and "cert" not in files:
        raise SettingError(
            f"{given.called('key')} is that of cert, which is missing: give both, or leave key out"
        )
    # One file may hold both, as torch's client has it where only `cert` is given.
    key = "key" if "key" in files else "cert"
    names = FileNames(given.called("cert"), given.called(key), given.called("cacert"))
    return ClientTLS(files.get("cacert"), files.get("cert"), files.get(key), names)
