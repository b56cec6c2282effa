"""Where a job's hosts meet: from torchrun's rendezvous flags to the place of our service.

Scripts name torch's backends. `static` and `c10d` mean that an agent of the job serves rendezvous itself, as torch's
agents hold the store, and `etcd` that a job has nothing but an etcd. Here that is our own service in each case, so the
rest of a job's life is the same for all backends.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rallypoint.launcher.plan import Embedded, ExternalService, Hosted, Place, Replicated
from rallypoint.rpc.endpoint import SettingError, without_password

# ---- `--rdzv-conf` as torchrun's users write it: torch's keys beside ours, each with its meaning here or a word on
# it.


_STATIC_TIMEOUT = "900"  # seconds; torchrun's
_TRUE = ("1", "true", "t", "yes", "y")
_FALSE = ("0", "false", "f", "no", "n")
# Keys of torch's backends that change nothing here, and why.
_MEANINGLESS = {
    "heartbeat_timeout": "a heartbeat here is one message on an open stream",
    "use_libuv": "there is no TCPStore here",
    "rank": "--node-rank says it",
}


@dataclass(frozen=True, slots=True)
class TorchConf:
    """What `--rdzv-conf` says.

    Attributes:
        settings: By the names that `rallypoint.agent.config.settings.rendezvous_conf` knows.
        is_host: Whether this host is to serve rendezvous; None: whoever has the endpoint's address.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    is_host: bool | None = None


def split_conf(pairs: Mapping[str, str], backend: str) -> tuple[TorchConf, tuple[str, ...]]:
    """Give torch's keys their meaning.

    Args:
        pairs: What was given.
        backend: `rallypoint`, `static`, `c10d` or `etcd`: torch's backends read different keys.

    Returns:
        The settings, and a line for each key that has no meaning here.

    Raises:
        SettingError: A value makes no sense; one line.
    """
    settings = dict(pairs)
    notices = []
    is_host = None
    static_timeout = _STATIC_TIMEOUT
    for key, reason in _MEANINGLESS.items():
        if settings.pop(key, None) is not None:
            notices.append(f"--rdzv-conf: {key} has no meaning here: {reason}")
    if (text := settings.pop("is_host", None)) is not None:
        if backend == "c10d":
            is_host = _truth("is_host", text)
        else:
            notices.append("--rdzv-conf: is_host has no meaning here: it belongs to --rdzv-backend c10d")
    if (text := settings.pop("timeout", None)) is not None:
        if backend == "static":
            static_timeout = text
        else:
            notices.append(
                "--rdzv-conf: timeout has no meaning here: join_timeout is how long nodes are waited for"
            )
    if backend == "static":
        # How long torch's static backend waits, for its store as for the other nodes.
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
    """What was asked for, as the flags of torchrun have it.

    Attributes:
        backend: Name of the backend; None: not given.
        endpoint: `--rdzv-endpoint`; empty: not given.
        run_id: `--rdzv-id`; empty: not given.
        conf: `--rdzv-conf`.
        nodes: Fewest and most nodes.
        nodes_given: Whether somebody said so; otherwise they are what nobody says anything about.
        standalone: Whether the job is this host's alone.
        node_rank: `--node-rank`; None: not given.
        master_address: `--master-addr`; None: not given.
        master_port: `--master-port`; None: not given.
        environment: Where a password may be that is not to stand in a command line.
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
    """Where and as what this host meets the others.

    Attributes:
        place: Where the rendezvous service is.
        run_id: Name of the run.
        node_id: Name of this host in it; empty: any.
        nodes: Fewest and most nodes; None: as wished.
        conf: Settings of the run, by our names.
        master_address: MASTER_ADDR of every round; None: found out for each.
        master_port: MASTER_PORT of every round; None: likewise.
        notices: What was asked for and has no meaning here; each one line.
    """

    service: Place
    run_id: str
    node_id: str = ""
    nodes: tuple[int, int] | None = None
    conf: Mapping[str, str] = field(default_factory=dict)
    master_address: str | None = None
    master_port: int | None = None
    notices: tuple[str, ...] = ()


def resolve_rendezvous(wish: RequestedRendezvous) -> ResolvedRendezvous:
    """Decide where this host meets the others.

    Raises:
        SettingError: What was asked for contradicts itself, or something is missing; one line that names the flag.
    """
    backend = wish.backend
    if backend is not None and backend not in BACKENDS:
        raise SettingError(
            f"--rdzv-backend: {backend!r} is no backend; expected {', '.join(BACKENDS)} (rallypoint if left out)"
        )
    if wish.standalone:
        return _alone(wish, _overruled(wish))
    if backend in ("etcd", "etcd-v2") or is_etcd_url(wish.endpoint):
        return _etcd(wish)
    if _is_static(wish):
        return _static(wish)
    if backend == "c10d":
        return _c10d(wish)
    if not wish.endpoint and wish.nodes == (1, 1):
        return _alone(wish, _unused(wish, "a job of one host"))
    return _standing(wish)


def is_etcd_url(endpoint: str) -> bool:
    """Whether an endpoint is meant as the URL of an etcd, well-formed or not."""
    scheme, mark, _ = endpoint.strip().partition("://")
    return bool(mark) and scheme in ETCD_SCHEMES


def _is_static(wish: RequestedRendezvous) -> bool:
    """Whether torchrun would take its default backend: it was named, or is meant by the flags that only it has."""
    given = (wish.node_rank, wish.master_address, wish.master_port)
    if wish.backend is not None:
        return wish.backend == "static"
    fixed = wish.nodes[0] == wish.nodes[1]
    if wish.endpoint or not fixed:
        return False
    return wish.master_port is not None if wish.nodes[1] == 1 else any(each is not None for each in given)


def _alone(wish: RequestedRendezvous, notices: tuple[str, ...]) -> ResolvedRendezvous:
    if wish.nodes != (1, 1):
        raise SettingError("--nnodes: --standalone runs on this host alone: leave --nnodes out")
    conf, more = split_conf(wish.conf, "rallypoint")
    run_id = wish.run_id or f"standalone-{os.urandom(4).hex()}"
    return ResolvedRendezvous(
        service=Embedded(), run_id=run_id, conf=conf.settings, notices=(*notices, *more)
    )


def _standing(wish: RequestedRendezvous) -> ResolvedRendezvous:
    if not wish.endpoint:
        raise SettingError(
            "where is the rendezvous service? Give --rdzv-endpoint HOST:PORT (start one with `rallypoint serve "
            "rendezvous`), or --node-rank and --master-addr as with torchrun, or --standalone for a job of this host "
            "alone"
        )
    if not wish.run_id:
        raise SettingError(
            "which run is this? Give --rdzv-id NAME, the same on all hosts and new for every job"
        )
    conf, notices = split_conf(wish.conf, "rallypoint")
    return ResolvedRendezvous(
        service=ExternalService(wish.endpoint),
        run_id=wish.run_id,
        conf=conf.settings,
        notices=(*_unused(wish, "the rallypoint backend"), *notices),
    )


def _c10d(wish: RequestedRendezvous) -> ResolvedRendezvous:
    conf, notices = split_conf(wish.conf, "c10d")
    notices = (*_unused(wish, "the c10d backend"), *notices)
    host, port = _parse_endpoint(wish.endpoint, C10D_PORT)
    run_id = wish.run_id or NO_RUN_ID
    if port == 0:
        # What torchrun itself asks for where a job has one host: any free port.
        if wish.nodes[1] > 1:
            raise SettingError(
                f"--rdzv-endpoint: {wish.endpoint!r} has port 0, which no other host can find; give a port"
            )
        return ResolvedRendezvous(service=Embedded(), run_id=run_id, conf=conf.settings, notices=notices)
    place = Hosted(_endpoint(host, port), conf.is_host)
    return ResolvedRendezvous(service=place, run_id=run_id, conf=conf.settings, notices=notices)


def _etcd(wish: RequestedRendezvous) -> ResolvedRendezvous:
    # What only this backend needs is loaded only for it.
    from rallypoint.launcher.etcd_url import of_flags, of_url  # noqa: PLC0415

    if is_etcd_url(wish.endpoint):
        if wish.backend not in (None, "etcd"):
            raise SettingError(
                f"--rdzv-backend {wish.backend} contradicts --rdzv-endpoint, a URL of etcd: leave the backend out"
            )
        found = of_url(
            wish.endpoint,
            run_id=wish.run_id,
            nodes=wish.nodes if wish.nodes_given else None,
            conf=wish.conf,
            environment=wish.environment,
        )
    else:
        backend = wish.backend or "etcd"
        found = of_flags(backend, wish.endpoint, wish.run_id, conf=wish.conf, environment=wish.environment)
    conf, notices = split_conf(found.conf, "etcd")
    return ResolvedRendezvous(
        service=Replicated(found.address),
        run_id=found.run_id,
        nodes=found.nodes,
        conf=conf.settings,
        notices=(*_unused(wish, "the etcd backend"), *notices),
    )


def _static(wish: RequestedRendezvous) -> ResolvedRendezvous:
    least, most = wish.nodes
    rank = wish.node_rank or 0
    if least != most:
        raise SettingError(
            f"--nnodes: {least}:{most} is elastic, and the static backend is not; give one number, or another "
            "--rdzv-backend"
        )
    if not 0 <= rank < most:
        raise SettingError(
            f"--node-rank: {rank} is not one of {most} nodes'; expected a number from 0 to {most - 1}"
        )
    conf, notices = split_conf(wish.conf, "static")
    if "rank_policy" in conf.settings:
        raise SettingError(
            "--rdzv-conf: rank_policy contradicts the static backend: --node-rank says the ranks"
        )
    named = wish.master_address is not None or wish.master_port is not None
    master = (wish.master_address or MASTER_ADDRESS, wish.master_port or MASTER_PORT)
    place = master[0], master[1] + 1
    if wish.endpoint:
        at = _parse_endpoint(wish.endpoint, -1)
        if at[1] < 1:
            raise SettingError(
                f"--rdzv-endpoint: {wish.endpoint!r} has no port; the static backend needs one"
            )
        # Alone, it is what torchrun takes for the master's; the workers' own store needs that port.
        place, master = (at, master) if named else ((at[0], at[1] + 1), at)
    if place[1] > 65535:
        raise SettingError(
            f"--master-port: {master[1]} leaves no port for the rendezvous service, which takes the next one; "
            "choose a lower one, or name a place with --rdzv-endpoint"
        )
    return ResolvedRendezvous(
        service=Hosted(_endpoint(*place), rank == 0) if most > 1 else Embedded(),
        run_id=wish.run_id or NO_RUN_ID,
        node_id=f"rank{rank}",
        conf=conf.settings,
        master_address=master[0],
        master_port=master[1],
        notices=notices,
    )


def _unused(wish: RequestedRendezvous, where: str) -> tuple[str, ...]:
    """What torchrun too passes over, with a warning."""
    given = {
        "--node-rank": wish.node_rank not in (None, 0),
        "--master-addr": wish.master_address is not None,
        "--master-port": wish.master_port is not None,
    }
    return tuple(
        f"{flag} has no meaning for {where}: it belongs to --rdzv-backend static"
        for flag, is_given in given.items()
        if is_given
    )


def _overruled(wish: RequestedRendezvous) -> tuple[str, ...]:
    given = {"--rdzv-backend": wish.backend, "--rdzv-endpoint": wish.endpoint}
    return (
        *(
            f"{flag} has no meaning beside --standalone, which has its own rendezvous"
            for flag, value in given.items()
            if value
        ),
        *_unused(wish, "a job of one host"),
    )


def _parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Host, IPv6 without brackets, and port of an endpoint as torchrun takes it: both may be missing."""
    text = text.strip()
    shown = without_password(text)
    if "," in text:
        raise SettingError(
            f"--rdzv-endpoint: {shown!r} names several places, which only --rdzv-backend rallypoint, etcd and etcd-v2 "
            "take; give one"
        )
    if "@" in text:
        raise SettingError(
            f"--rdzv-endpoint: {shown!r} names a user, which only --rdzv-backend etcd and etcd-v2 take"
        )
    if not text:
        return "localhost", default_port
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], default_port
    host, colon, port = text.rpartition(":")
    if not colon:
        return text, default_port
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise SettingError(f"--rdzv-endpoint: {text!r} has port {port!r}, expected a number from 0 to 65535")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _endpoint(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
