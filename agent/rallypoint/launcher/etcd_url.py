"""Parse torch's etcd rendezvous, from its URL or torchrun's flags, for our own service over that etcd.

Nothing here reads the machine or the network: the same text gives the same result everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, unquote

from rallypoint.agent.config.settings import MOST_SECONDS
from rallypoint.etcd.endpoint import (
    CONTROL,
    EtcdAddress,
    complete_user,
    parse_hosts,
    parse_query,
    parse_userinfo,
    split_url,
)
from rallypoint.rendezvous.core.state import MOST_NODES
from rallypoint.rpc.endpoint import ClientTLS, FileNames, SettingError, without_password
from rallypoint.rpc.text import whole_number

EXPECTED = "expected etcd://HOST:PORT[,HOST:PORT...]/RUN_ID[?min_workers=N&max_workers=N&...]"

# Prefixes of the keys of torch's two backends.
_PREFIXES = {"etcd": "/torchelastic/p2p", "etcd-v2": "/torch/elastic/rendezvous"}
# Seconds that a round waits for its nodes: for a URL, as torch documents it; for flags, torchrun adds the value of its
# static backend. Its etcd-v2 does not read this.
_URL_TIMEOUT = "600"
_FLAGS_TIMEOUT = "900"
# torch's two backends have different names for these.
_ALIASES = {"ssl_cert": "cert", "ssl_cert_key": "key", "ca_cert": "cacert"}
_TLS_FILES = ("cert", "key", "cacert")
_NODES = ("min_workers", "max_workers")
_OF_ETCD = ("etcd_prefix", "protocol", *_TLS_FILES)
_OF_URL = (*_NODES, "timeout", "last_call_timeout", *_OF_ETCD)
# Every key in etcd begins with prefix and run; longer ones use up the size limit of a transaction.
_LONGEST_SPACE = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRendezvous:
    """The rendezvous of a job that has only an etcd.

    Attributes:
        address: The etcd; its prefix is for this run alone.
        nodes: Fewest and most nodes; None: not given.
        conf: Settings of the run, by the names of `--rdzv-conf`; those that are not etcd's are unchanged.
    """

    address: EtcdAddress
    run_id: str
    nodes: tuple[int, int] | None = None
    conf: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _EtcdParameters:
    """Torch's parameters of etcd and of its timeouts, and the source of each, for messages.

    Attributes:
        values: Values by torch's names.
        spelled: For parameters from `--rdzv-conf`: their spelling there, by torch's names.
        endpoint: `--rdzv-endpoint` and its value, without a password.
    """

    values: Mapping[str, str]
    spelled: Mapping[str, str]
    endpoint: str

    def where(self, name: str) -> str:
        """Return the flag that set a parameter, with the value if it is the endpoint."""
        return "--rdzv-conf" if name in self.spelled else self.endpoint

    def called(self, name: str) -> str:
        """Return the name of a parameter, as spelled in its source."""
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
        url: The URL. Parameters are torch's: min_workers, max_workers (default: min_workers), timeout (600 s),
            last_call_timeout (30 s), etcd_prefix (/torchelastic/p2p), protocol (http), cert, key, cacert.
        run_id: Value of `--rdzv-id`; empty: not given.
        nodes: Value of `--nnodes`; None: not given.
        environment: Holds the user's password, in RALLYPOINT_ETCD_PASSWORD.

    Raises:
        SettingError: The URL is wrong, or contradicts another flag; one line, without the password.
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
    """Read `--rdzv-backend etcd` or `etcd-v2`, and torchrun's flags for it.

    Args:
        backend: `etcd` or `etcd-v2`.
        endpoint: `[user@]host[:port][,...]`; empty: this host, as with torchrun.
        run_id: Value of `--rdzv-id`.
        conf: Value of `--rdzv-conf`: the parameters of the URL, except for the numbers of nodes, and any other
            setting of a run.
        environment: Holds the user's password, in RALLYPOINT_ETCD_PASSWORD.

    Raises:
        SettingError: A flag is wrong or contradicts another; one line, without the password.
    """
    own, others = _split(conf or {})
    where = f"--rdzv-endpoint: {without_password(endpoint)!r}"
    if "://" in endpoint or "/" in endpoint.rpartition("@")[2]:
        raise SettingError(f"{where} has a /: expected [USER@]HOST[:PORT], or etcd://HOST:PORT/RUN_ID")
    given = _EtcdParameters(own, {_ALIASES.get(key, key): key for key in conf or {}}, where)
    if backend == "etcd":
        _seconds(given, others, _FLAGS_TIMEOUT)
    elif "timeout" in own:
        others["timeout"] = own["timeout"]  # only torch's older backend reads it
    userinfo, _, hosts = (endpoint.strip() or "localhost").rpartition("@")
    return EtcdRendezvous(
        address=_address(userinfo, hosts, _space(given, _PREFIXES[backend], run_id), given, environment),
        run_id=run_id,
        conf=others,
    )


def _split(conf: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split `--rdzv-conf` into the settings of etcd with torch's timeout, and the rest."""
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
    """Translate torch's timeouts to our settings."""
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
        return math.nan  # outside every range


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
    if (number := whole_number(given[name], 1, MOST_NODES)) is None:
        raise SettingError(f"{where} has {name}={given[name]}, expected a number of nodes, 1 to {MOST_NODES}")
    return number


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
    """Return the key prefix of a run. A slash in its name is quoted: it could lead into the keys of another run."""
    if not run_id:
        raise SettingError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job: the keys of the last "
            "job of that name stay in etcd for two hours"
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
    # One file may hold both: torch's client reads both from `cert` if only that is given.
    key = "key" if "key" in files else "cert"
    names = FileNames(given.called("cert"), given.called(key), given.called("cacert"))
    return ClientTLS(files.get("cacert"), files.get("cert"), files.get(key), names=names)
