"""From torchrun's rendezvous flags to the settings of a node: the part of them that a companion needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.addresses import own_address_towards
from rallypoint.agent.config.job import JobConfig, Peer, new_node_id
from rallypoint.agent.config.settings import RunSettingError, rendezvous_conf
from rallypoint.launcher.backends import C10D_PORT, split_conf
from rallypoint.rendezvous.core.state import MOST_RESTARTS, MOST_RESTARTS_KEPT, RunSettings
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import (
    ClientSecurity,
    ClientTLS,
    EndpointError,
    SettingError,
    client_security,
    parse_endpoints,
    run_secret,
)
from rallypoint.rpc.logs import get_logger

_log = get_logger("rallypoint.torch")

_FILES = ("tls_ca", "tls_cert", "tls_key", "run_secret_file", "token_file")
_TRUE = ("1", "true", "yes")


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """This host's node: the configuration, and `patience`, the longest silent wait for a round in seconds."""

    config: JobConfig
    patience: float


async def node_settings(start: Mapping[str, Any]) -> NodeSettings:
    """Make the configuration of this host's node from the backend parameters of torchrun.

    Raises:
        SettingError: One of them is invalid; one line.
    """
    given: dict[str, str] = dict(start["conf"])
    # LaunchConfig always sets it, for its own backends.
    given.pop("timeout", None)
    security = security_of(given)
    own = {name: given.pop(name, "") for name in ("node_id", "role", "topology", "local_world_size")}
    conf, notices = split_conf(given, "rallypoint")
    for notice in notices:
        _log.info(notice)
    # torchrun counts restarts itself, on each host: the run must not end before.
    kept = {"restart_window", "max_restarts_per_node"} & conf.settings.keys()
    most = MOST_RESTARTS_KEPT if kept else MOST_RESTARTS
    try:
        parsed = rendezvous_conf(conf.settings, (start["min_nodes"], start["max_nodes"]), most)
    except RunSettingError as error:
        raise SettingError(f"--rdzv-conf: {error}") from None
    # A closed run stays closed, as with torch's own rendezvous, unless `reopen` is given.
    parsed.settings.reopen = parsed.settings.reopen or pb.REOPEN_NEVER
    endpoint = endpoint_of(start["endpoint"])
    config = JobConfig(
        run_id=start["run_id"],
        node_id=own["node_id"] or new_node_id(),
        address=start["local_addr"] or await own_address_towards(endpoint, parsed.read_timeout),
        settings=parsed.settings,
        command=(),
        environment={},
        rendezvous=Peer(endpoint, security),
        timer=Peer(""),
        local_world_size=_count("local_world_size", own["local_world_size"] or "1"),
        role=own["role"] or "default",
        topology=own["topology"],
        connect_timeout=parsed.read_timeout,
        close_timeout=parsed.close_timeout,
    )
    return NodeSettings(config, _patience(parsed.settings))


def endpoint_of(endpoint: str) -> str:
    """Return an endpoint, or several, with torch's default port where one has none."""
    if not endpoint:
        raise SettingError("where is the rendezvous service? Give --rdzv-endpoint HOST:PORT")
    parts = [part.strip() for part in endpoint.split(",")]
    try:
        return str(
            parse_endpoints(",".join(part if ":" in part else f"{part}:{C10D_PORT}" for part in parts))
        )
    except EndpointError as error:
        raise SettingError(f"--rdzv-endpoint: {error}") from None


def security_of(conf: dict[str, str]) -> ClientSecurity:
    """Take the keys about security out of `--rdzv-conf`; those not given are read from the environment."""
    texts = {
        name: conf.pop(name, "") or os.environ.get(f"RALLYPOINT_{name.upper()}", "")
        for name in (*_FILES, "insecure")
    }
    files = {name: Path(texts[name]) if texts[name] else None for name in _FILES}
    tls = ClientTLS(files["tls_ca"], files["tls_cert"], files["tls_key"])
    return client_security(
        tls if tls != ClientTLS() else None,
        run_secret(files["run_secret_file"]),
        insecure=texts["insecure"].lower() in _TRUE,
        token=files["token_file"],
    )


def _count(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise SettingError(f"--rdzv-conf: {name}={text!r} is not a number of workers, at least 1")
    return int(text)


def _patience(settings: pb.RunSettings) -> float:
    """Seconds after which a service that sends nothing about the next round counts as lost.

    In this time it lets a round begin, or refuses the nodes that wait for others.
    """
    default = RunSettings()
    return 30.0 + sum(
        (
            to_seconds(settings.join_timeout) or default.join_timeout,
            to_seconds(settings.last_call_timeout) or default.last_call_timeout,
            to_seconds(settings.confirm_timeout) or default.confirm_timeout,
            to_seconds(settings.restart_backoff) or default.restart_backoff,
        )
    )
