"""Requests from the wire to commands: every field is checked here, and nowhere else."""

from __future__ import annotations

import functools

from google.protobuf.duration_pb2 import Duration

from rallypoint.rendezvous.codec import from_message
from rallypoint.rendezvous.core import commands
from rallypoint.rendezvous.core.state import (
    FailureKind,
    RankPolicy,
    RunSettings,
    ScaleUpPolicy,
    WorkerFailure,
)
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import NAME_BYTES, PATH_BYTES, SENTENCE_BYTES, count, name, text

TRACEBACK_BYTES = 16 * 1024
# Bounds that no sensible run comes near. The first two keep every rank within 32 bits. A time no longer than the
# last (in nanoseconds below 2**51) goes through a float and back without losing one of them, so a node's settings
# are the same on the wire, in the core and in a journal.
MOST_NODES = 100_000
MOST_WORKERS_PER_NODE = 16_384
MOST_RESTARTS = 1_000_000
# Where restarts are kept one by one, with time and node, each takes some 50 bytes of every checkpoint.
MOST_RESTARTS_KEPT = 10_000
LONGEST = 25 * 24 * 3600.0
# All settings set take less than half of this; what has unknown fields on top is not worth keeping.
_SETTINGS_BYTES = 512
# Past it a time can't be written down again (year 10,000), unix seconds.
_LATEST = 253_402_300_000


def join_command(request: pb.JoinRun) -> commands.Join:
    """A `join`, checked.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    name("run_id", request.run_id)
    name("node_id", request.node_id)
    text("address", request.address, NAME_BYTES)
    if not request.address:
        raise invalid("address", "must not be empty: it is how the other nodes reach this one")
    text("role", request.role, NAME_BYTES)
    text("topology", request.topology, NAME_BYTES)
    count("local_world_size", request.local_world_size, 1, MOST_WORKERS_PER_NODE)
    return commands.Join(
        node_id=request.node_id,
        settings=_settings_of(request.settings),
        address=request.address,
        local_world_size=request.local_world_size,
        role=request.role,
        topology=request.topology,
    )


def _settings_of(message: pb.RunSettings) -> RunSettings:
    """As `run_settings`; the nodes of a run all bring the same, so what was read once is kept."""
    encoded = message.SerializeToString()
    return _decoded_settings(encoded) if len(encoded) <= _SETTINGS_BYTES else run_settings(message)


@functools.lru_cache(maxsize=256)
def _decoded_settings(encoded: bytes) -> RunSettings:
    return run_settings(pb.RunSettings.FromString(encoded))


def run_settings(message: pb.RunSettings) -> RunSettings:
    """Settings, checked, with the defaults in the place of what is absent.

    Raises:
        ServiceError: INVALID_ARGUMENT, naming the field.
    """
    count("settings.min_nodes", message.min_nodes, 1, MOST_NODES)
    if message.max_nodes < message.min_nodes:
        raise invalid(
            "settings.max_nodes", f"must be at least min_nodes ({message.min_nodes}), not {message.max_nodes}"
        )
    count("settings.max_nodes", message.max_nodes, 1, MOST_NODES)
    count("settings.max_restarts", message.max_restarts, 0, MOST_RESTARTS)
    count("settings.keep_alive_max_attempt", message.keep_alive_max_attempt, 0, 1000)
    default = RunSettings()
    window = _seconds(message, "restart_window", default.restart_window, zero=True)
    _check_budgets(message, window)
    try:
        policy = ScaleUpPolicy(message.scale_up_policy or default.scale_up_policy)
    except ValueError:
        raise invalid("settings.scale_up_policy", f"unknown policy {message.scale_up_policy}") from None
    try:
        rank_policy = RankPolicy(message.rank_policy or default.rank_policy)
    except ValueError:
        raise invalid("settings.rank_policy", f"unknown policy {message.rank_policy}") from None
    return RunSettings(
        min_nodes=message.min_nodes,
        max_nodes=message.max_nodes,
        max_restarts=message.max_restarts,
        join_timeout=_seconds(message, "join_timeout", default.join_timeout),
        last_call_timeout=_seconds(message, "last_call_timeout", default.last_call_timeout, zero=True),
        confirm_timeout=_seconds(message, "confirm_timeout", default.confirm_timeout),
        keep_alive_interval=_seconds(message, "keep_alive_interval", default.keep_alive_interval),
        keep_alive_max_attempt=message.keep_alive_max_attempt or default.keep_alive_max_attempt,
        disconnect_grace=_seconds(message, "disconnect_grace", default.disconnect_grace, zero=True),
        scale_up_policy=policy,
        exit_barrier_timeout=_seconds(message, "exit_barrier_timeout", default.exit_barrier_timeout),
        scale_up_delay=_seconds(message, "scale_up_delay", default.scale_up_delay, zero=True),
        rank_policy=rank_policy,
        restart_window=window,
        max_restarts_per_node=message.max_restarts_per_node,
        restart_backoff=_seconds(message, "restart_backoff", default.restart_backoff, zero=True),
    )


def _check_budgets(message: pb.RunSettings, window: float) -> None:
    of_run, of_node = message.max_restarts, message.max_restarts_per_node
    count("settings.max_restarts_per_node", of_node, 0, MOST_RESTARTS)
    if of_node > of_run:
        raise invalid(
            "settings.max_restarts_per_node",
            f"must be at most max_restarts ({of_run}), past which the run ends, not {of_node}",
        )
    if of_run > MOST_RESTARTS_KEPT and (window or of_node):
        raise invalid(
            "settings.max_restarts",
            f"must be at most {MOST_RESTARTS_KEPT} with a restart_window or max_restarts_per_node, not {of_run}",
        )


def worker_failure(message: pb.WorkerFailure, node_id: str) -> WorkerFailure:
    """A failure report of a node, cut to the bounds of the protocol: a report too long is not a report lost."""
    kept = pb.WorkerFailure()
    kept.CopyFrom(message)
    kept.node_id = node_id
    kept.role = line(message.role, NAME_BYTES)
    kept.host = line(message.host, NAME_BYTES)
    kept.message = line(message.message, SENTENCE_BYTES)
    kept.log_file = line(message.log_file, PATH_BYTES)
    kept.core_file = line(message.core_file, PATH_BYTES)
    kept.age.FromNanoseconds(min(max(0, message.age.ToNanoseconds()), round(LONGEST * 1e9)))
    if message.kind not in {int(kind) for kind in FailureKind}:
        kept.ClearField("kind")  # of a newer agent
    if not (0 <= message.time.seconds < _LATEST and 0 <= message.time.nanos < 10**9):
        kept.ClearField("time")
    kept.traceback = message.traceback.encode()[-TRACEBACK_BYTES:].decode(errors="ignore")
    return from_message(kept, WorkerFailure)


def _seconds(message: pb.RunSettings, field: str, default: float, *, zero: bool = False) -> float:
    if not message.HasField(field):  # type: ignore[arg-type]
        return default
    duration: Duration = getattr(message, field)
    seconds = duration.ToNanoseconds() / 1e9
    if seconds < 0 or seconds > LONGEST or (seconds == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise invalid(
            f"settings.{field}", f"must be {least} and at most {LONGEST:.0f} seconds, not {seconds:g}"
        )
    return seconds


def line(value: str, most_bytes: int) -> str:
    """The beginning of a text, with spaces for whatever would not print on a line."""
    head = value.encode()[:most_bytes].decode(errors="ignore")
    return head if head.isprintable() else "".join(c if c.isprintable() else " " for c in head)
