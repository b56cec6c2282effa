"""Resolve torchrun's rendezvous flags to the location of our rendezvous service.

Scripts name torch's backends. With `static` and `c10d` an agent of the job serves rendezvous itself, as torch's agents
hold the store; with `etcd` a job has only an etcd. Here each of them leads to our own service, so everything after
the rendezvous is the same for all backends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.launcher.plan import Embedded, ExternalService, Hosted, Place, Replicated
from rallypoint.rpc.endpoint import Endpoint, SettingError, without_password
from rallypoint.rpc.text import whole_number

# ---- `--rdzv-conf` as torchrun's users write it: torch's keys are translated to ours, or reported as meaningless.


_STATIC_TIMEOUT = "900"  # seconds; torchrun's
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
# Keys of torch's backends without an effect here, and why.
_MEANINGLESS = {
    "heartbeat_timeout": "a heartbeat here is one message on an open stream",
    "use_libuv": "there is no TCPStore here",
    "cas_backoff_max_seconds": "joins are pushed to one service, which never makes a node write again",
    "rank": "--node-rank sets it",
}


@dataclass(frozen=True, slots=True)
class TorchConf:
    """The translated settings of `--rdzv-conf`.

    Attributes:
        settings: Settings by the names that `rallypoint.agent.config.settings.rendezvous_conf` knows.
        is_host: True if this host serves rendezvous, False if not; None: the host with the endpoint's address does.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    is_host: bool | None = None


def split_conf(pairs: Mapping[str, str], backend: str) -> tuple[TorchConf, tuple[str, ...]]:
    """Translate torch's keys.

    Args:
        backend: `rallypoint`, `static`, `c10d` or `etcd`: torch's backends read different keys.

    Returns:
        The settings, and a line for each key that has no meaning here.

    Raises:
        SettingError: A value is invalid; one line.
    """
    settings = dict(pairs)
    notices = []
    is_host = None
    static_timeout = _STATIC_TIMEOUT
    for key, reason in _MEANINGLESS.items():
        if settings.pop(key, None) is not None:
            notices.append(f"--rdzv-conf: {key} has no meaning here: {reason}")
    if (text := settings.pop("is_host", None)) is not None:
        if backend in ("c10d", "static"):
            is_host = _truth("is_host", text)
        else:
            notices.append(
                "--rdzv-conf: is_host has no meaning here: it belongs to --rdzv-backend c10d and static"
            )
    if (text := settings.pop("timeout", None)) is not None:
        if backend == "static":
            static_timeout = text
        else:
            notices.append(
                "--rdzv-conf: timeout has no meaning here: join_timeout is how long a round waits for nodes"
            )
    if backend == "static":
        # Torch's static backend uses one timeout for its store and for the other nodes.
        settings.setdefault("read_timeout", static_timeout)
        settings.setdefault("join_timeout", static_timeout)
    if (text := settings.pop("store_type", None)) is not None and text.lower() != "tcp":
        raise SettingError(
            f"--rdzv-conf: store_type={text} is not possible: hosts meet at a service, not at a file; leave it out"
        )
    return TorchConf(settings, is_host), tuple(notices)


def _truth(key: str, text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise SettingError(f"--rdzv-conf: {key}={text!r} is neither true nor false")


BACKENDS = ("rallypoint", "static", "c10d", "etcd", "etcd-v2")
C10D_PORT = 29400
MASTER_ADDRESS = "127.0.0.1"
MASTER_PORT = 29500
NO_RUN_ID = "none"
ETCD_SCHEMES = ("etcd", "etcds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedRendezvous:
    """The rendezvous as torchrun's flags describe it.

    Attributes:
        backend: Name of the backend; None: not given.
        endpoint: `--rdzv-endpoint`; empty: not given.
        run_id: `--rdzv-id`; empty: not given.
        nodes: Fewest and most nodes.
        nodes_given: True if the user gave `nodes`; False: they are the default.
        standalone: True for a job of this host alone.
        node_rank: `--node-rank`; None: not given.
        master_address: `--master-addr`; None: not given.
        master_port: `--master-port`; None: not given.
        environment: Variables that may hold a password, which should not be in a command line.
    """

    backend: str | None = None
    endpoint: str = ""
    run_id: str = ""
    conf: Mapping[str, str] = field(default_factory=dict)
    nodes: tuple[int, int] = (1, 1)
    nodes_given: bool = False
    standalone: bool = False
    node_rank: int | None = None
    master_address: str | None = None
    master_port: int | None = None
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRendezvous:
    """The rendezvous that this host joins, and its identity there.

    Attributes:
        service: Where the rendezvous service is.
        node_id: Name of this host in the run; empty: any.
        nodes: Fewest and most nodes; None: as requested.
        conf: Settings of the run, by our names.
        master_address: MASTER_ADDR of every round; None: determined for each round.
        master_port: MASTER_PORT of every round; None: likewise.
        notices: Requested settings that have no meaning here; one line each.
    """

    service: Place
    run_id: str
    node_id: str = ""
    nodes: tuple[int, int] | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    master_address: str | None = None
    master_port: int | None = None
    notices: tuple[str, ...] = ()


def resolve_rendezvous(flags: RequestedRendezvous) -> ResolvedRendezvous:
    """Decide which rendezvous this host joins.

    Raises:
        SettingError: The flags contradict one another, or one is missing; one line that names the flag.
    """
    backend = flags.backend
    if backend is not None and backend not in BACKENDS:
        raise SettingError(
            f"--rdzv-backend: {backend!r} is not a backend; expected {', '.join(BACKENDS)} (rallypoint if left out)"
        )
    if flags.standalone:
        return _alone(flags, _overruled(flags))
    if backend in ("etcd", "etcd-v2") or is_etcd_url(flags.endpoint):
        return _etcd(flags)
    if is_static(flags):
        return _static(flags)
    if backend == "c10d":
        return _c10d(flags)
    if not flags.endpoint and flags.nodes == (1, 1):
        return _alone(flags, _unused(flags, "a job of one host"))
    return _standing(flags)


def is_etcd_url(endpoint: str) -> bool:
    """Return True if an endpoint is meant as the URL of an etcd, well-formed or not."""
    scheme, mark, _ = endpoint.strip().partition("://")
    return bool(mark) and scheme in ETCD_SCHEMES


def is_static(flags: RequestedRendezvous) -> bool:
    """Return True if torchrun would use its default backend: it is named, or implied by flags that only it has."""
    given = (flags.node_rank, flags.master_address, flags.master_port)
    if flags.backend is not None:
        return flags.backend == "static"
    fixed = flags.nodes[0] == flags.nodes[1]
    if flags.endpoint or not fixed:
        return False
    return flags.master_port is not None if flags.nodes[1] == 1 else any(each is not None for each in given)


def _alone(flags: RequestedRendezvous, notices: tuple[str, ...]) -> ResolvedRendezvous:
    if flags.nodes != (1, 1):
        raise SettingError("--nnodes: --standalone runs on this host alone: leave --nnodes out")
    conf, more = split_conf(flags.conf, "rallypoint")
    run_id = flags.run_id or f"standalone-{os.urandom(4).hex()}"
    return ResolvedRendezvous(
        service=Embedded(), run_id=run_id, conf=conf.settings, notices=(*notices, *more)
    )


def _standing(flags: RequestedRendezvous) -> ResolvedRendezvous:
    if not flags.endpoint:
        raise SettingError(
            "where is the rendezvous service? Give --rdzv-endpoint HOST:PORT (start one with `rallypoint serve "
            "rendezvous`), or --node-rank and --master-addr as with torchrun, or --standalone for a job of this host "
            "alone"
        )
    if not flags.run_id:
        raise SettingError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job"
        )
    conf, notices = split_conf(flags.conf, "rallypoint")
    return ResolvedRendezvous(
        service=ExternalService(flags.endpoint),
        run_id=flags.run_id,
        conf=conf.settings,
        notices=(*_unused(flags, "the rallypoint backend"), *notices),
    )


def _c10d(flags: RequestedRendezvous) -> ResolvedRendezvous:
    conf, notices = split_conf(flags.conf, "c10d")
    notices = (*_unused(flags, "the c10d backend"), *notices)
    host, port = _parse_endpoint(flags.endpoint, C10D_PORT)
    run_id = flags.run_id or NO_RUN_ID
    if port == 0 and flags.nodes[1] > 1:
        raise SettingError(
            f"--rdzv-endpoint: {flags.endpoint!r} has port 0, which no other host can find; give a port"
        )
    # A job of one host meets no other host.
    hosted = Hosted(str(Endpoint(host, port)), conf.is_host, away=bool(conf.is_host))
    place = hosted if flags.nodes[1] > 1 else Embedded()
    return ResolvedRendezvous(service=place, run_id=run_id, conf=conf.settings, notices=notices)


def _etcd(flags: RequestedRendezvous) -> ResolvedRendezvous:
    # Loaded only for this backend.
    from rallypoint.launcher.etcd_url import of_flags, of_url  # noqa: PLC0415

    if is_etcd_url(flags.endpoint):
        if flags.backend not in (None, "etcd"):
            raise SettingError(
                f"--rdzv-backend {flags.backend} contradicts --rdzv-endpoint, a URL of etcd: leave the backend out"
            )
        found = of_url(
            flags.endpoint,
            run_id=flags.run_id,
            nodes=flags.nodes if flags.nodes_given else None,
            conf=flags.conf,
            environment=flags.environment,
        )
    else:
        backend = flags.backend or "etcd"
        found = of_flags(
            backend, flags.endpoint, flags.run_id, conf=flags.conf, environment=flags.environment
        )
    conf, notices = split_conf(found.conf, "etcd")
    return ResolvedRendezvous(
        service=Replicated(found.address),
        run_id=found.run_id,
        nodes=found.nodes,
        conf=conf.settings,
        notices=(*_unused(flags, "the etcd backend"), *notices),
    )


def _static(flags: RequestedRendezvous) -> ResolvedRendezvous:
    least, most = flags.nodes
    rank = flags.node_rank or 0
    if least != most:
        raise SettingError(
            f"--nnodes: {least}:{most} is elastic, and the static backend is not; give one number, or another "
            "--rdzv-backend"
        )
    if not 0 <= rank < most:
        raise SettingError(
            f"--node-rank: {rank} is not one of {most} nodes'; expected a number from 0 to {most - 1}"
        )
    conf, notices = split_conf(flags.conf, "static")
    if "rank_policy" in conf.settings:
        raise SettingError(
            "--rdzv-conf: rank_policy contradicts the static backend: --node-rank sets the ranks"
        )
    if conf.is_host not in (None, rank == 0):
        notices += ("--rdzv-conf: is_host has no meaning here: with the static backend, node rank 0 serves",)
    named = flags.master_address is not None or flags.master_port is not None
    master = (flags.master_address or MASTER_ADDRESS, flags.master_port or MASTER_PORT)
    place = master[0], master[1] + 1
    if flags.endpoint:
        at = _parse_endpoint(flags.endpoint, -1)
        if at[1] < 1:
            raise SettingError(
                f"--rdzv-endpoint: {flags.endpoint!r} has no port; the static backend needs one"
            )
        # An endpoint alone is the master's address, as in torchrun; the workers' own store needs that port.
        place, master = (at, master) if named else ((at[0], at[1] + 1), at)
    if place[1] > 65535:
        raise SettingError(
            f"--master-port: {master[1]} leaves no port for the rendezvous service, which takes the next one; "
            "choose a lower one, or give another address with --rdzv-endpoint"
        )
    return ResolvedRendezvous(
        service=Hosted(str(Endpoint(*place)), rank == 0, away=bool(conf.is_host)) if most > 1 else Embedded(),
        run_id=flags.run_id or NO_RUN_ID,
        node_id=f"rank{rank}",
        conf=conf.settings,
        master_address=master[0],
        master_port=master[1],
        notices=notices,
    )


def _unused(flags: RequestedRendezvous, where: str) -> tuple[str, ...]:
    """Return notices about flags that torchrun ignores too, with a warning."""
    given = {
        "--node-rank": flags.node_rank not in (None, 0),
        "--master-addr": flags.master_address is not None,
        "--master-port": flags.master_port is not None,
    }
    return tuple(
        f"{flag} has no meaning for {where}: it belongs to --rdzv-backend static"
        for flag, is_given in given.items()
        if is_given
    )


def _overruled(flags: RequestedRendezvous) -> tuple[str, ...]:
    given = {"--rdzv-backend": flags.backend, "--rdzv-endpoint": flags.endpoint}
    return (
        *(
            f"{flag} has no meaning beside --standalone, which has its own rendezvous"
            for flag, value in given.items()
            if value
        ),
        *_unused(flags, "a job of one host"),
    )


def _parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Split an endpoint as torchrun does: host, IPv6 without brackets, and port; both may be missing."""
    text = text.strip()
    shown = without_password(text)
    if "," in text:
        raise SettingError(
            f"--rdzv-endpoint: {shown!r} names several addresses, which only --rdzv-backend rallypoint, etcd and "
            "etcd-v2 accept; give one"
        )
    if "@" in text:
        raise SettingError(
            f"--rdzv-endpoint: {shown!r} names a user, which only --rdzv-backend etcd and etcd-v2 accept"
        )
    if not text:
        return "localhost", default_port
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], default_port
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, default_port
    if (number := whole_number(port, 0, 65535)) is None:
        raise SettingError(f"--rdzv-endpoint: {text!r} has port {port!r}, expected a number from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), number
