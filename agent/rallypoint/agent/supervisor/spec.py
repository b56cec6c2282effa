"""Conversion of a JobSpec into a JobConfig, with a check of every field."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.duration_pb2 import Duration

from rallypoint.agent.addresses import local_address_towards
from rallypoint.agent.config.job import JobConfig, Peer, new_node_id
from rallypoint.agent.config.settings import (
    MOST_SECONDS,
    SHUTDOWN_TIMEOUT,
    RendezvousConf,
    RunSettingError,
    rendezvous_conf,
)
from rallypoint.agent.health.gpu import count_gpus, count_xpus
from rallypoint.agent.job.options import OPTIONS, OptionError, job_fields
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.workers.environment import check_devices
from rallypoint.rendezvous.core.state import MOST_NODES, MOST_RESTARTS, MOST_WORKERS_PER_NODE
from rallypoint.rpc.durations import is_repeated
from rallypoint.rpc.endpoint import ClientSecurity, SettingError, parse_endpoint
from rallypoint.rpc.errors import invalid
from rallypoint.serving.requests import PATH_BYTES, EveryField, count, name, seconds, text

AGENTS_PYTHON = "${python}"
"""Program of a command that stands for the agent's own Python: a client on another host can't know its path."""

_WORKERS = "nproc-per-node"
FIELDS: Mapping[str, str] = {
    name_: field
    for name_, option in OPTIONS.items()
    if (field := name_.replace("-", "_") + "s" * option.repeatable) in pb.JobSpec.DESCRIPTOR.fields_by_name
}
"""The options that have a field in a JobSpec, each with the name of that field."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings that the agent's host adds to a job.

    Attributes:
        rendezvous: Returns the daemon's own rendezvous service; None if its jobs can't reach that.
        timer: The daemon's own timer service.
        security: How connections to the services that jobs name are secured.
        environment: Environment that workers inherit.
    """

    rendezvous: Callable[[], Peer | None]
    timer: Peer
    security: ClientSecurity
    environment: Mapping[str, str]


def job_config(spec: pb.JobSpec, host: HostSettings) -> JobConfig:
    """Return the configuration of the job that a spec describes. May block in DNS look-ups.

    Raises:
        ServiceError: INVALID_ARGUMENT, with the name of the field.
    """
    _check(spec)
    environment = {**host.environment, **spec.environment}
    workers = _workers(spec, environment)
    options = _options(spec, workers)
    conf = _conf(spec, options.get("shutdown_timeout", SHUTDOWN_TIMEOUT))
    named = Peer(spec.rendezvous_endpoint, host.security)
    rendezvous = named if spec.rendezvous_endpoint else host.rendezvous()
    if rendezvous is None:
        raise invalid(
            "spec.rendezvous_endpoint",
            "must not be empty: the jobs of this agent can't use its own rendezvous service, because that uses TLS "
            "and was started without --tls-ca",
        )
    try:
        address = local_address_towards(rendezvous.endpoint)
    except SettingError as error:
        raise invalid("spec.rendezvous_endpoint", str(error)) from None
    config = JobConfig(
        run_id=spec.run_id,
        node_id=spec.node_id or new_node_id(),
        address=address,
        settings=conf.settings,
        command=_command(spec),
        environment=environment,
        rendezvous=rendezvous,
        timer=_timer(spec, host),
        local_world_size=workers,
        working_directory=Path(spec.working_directory) if spec.working_directory else _own_cwd(),
        connect_timeout=conf.read_timeout,
        close_timeout=conf.close_timeout,
        **options,
    )
    try:
        check_devices(config)
    except SettingError as error:
        raise invalid("spec.local_world_size", str(error)) from None
    return config


def _own_cwd() -> Path:
    try:
        return Path.cwd()
    except OSError as error:
        why = f"the agent's own folder can't be used ({error.strerror}): name another one"
        raise invalid("spec.working_directory", why) from None


def _check(spec: pb.JobSpec) -> None:
    with EveryField() as check:
        check(name, "spec.run_id", spec.run_id)
        check(text, "spec.node_id", spec.node_id)
        check(text, "spec.role", spec.role)
        check(text, "spec.topology", spec.topology)
        check(text, "spec.working_directory", spec.working_directory, PATH_BYTES)
        check(text, "spec.log_dir", spec.log_dir, PATH_BYTES)
        # A list of jobs contains it: a hundred of them must fit into a message.
        check(text, "spec.rendezvous_endpoint", spec.rendezvous_endpoint, PATH_BYTES)
        check(_check_command, spec)
        check(_check_environment, spec)
        check(count, "spec.local_world_size", spec.local_world_size, 0, MOST_WORKERS_PER_NODE)
        check(count, "spec.max_restarts", spec.max_restarts, 0, MOST_RESTARTS)
        check(_check_nodes, spec)


def _check_command(spec: pb.JobSpec) -> None:
    if not spec.command or not spec.command[0]:
        raise invalid("spec.command", "must name a program")
    if any("\0" in argument for argument in spec.command):
        raise invalid("spec.command", "must not have NUL characters")


def _check_environment(spec: pb.JobSpec) -> None:
    for variable, value in spec.environment.items():
        if not variable or "=" in variable or "\0" in variable + value:
            raise invalid("spec.environment", f"{variable!r} or its value is not valid for a variable")


def _check_nodes(spec: pb.JobSpec) -> None:
    least = spec.min_nodes or 1
    if not 1 <= least <= (spec.max_nodes or least) <= MOST_NODES:
        raise invalid(
            "spec.max_nodes", f"must be at least min_nodes ({least}), and both from 1 to {MOST_NODES}"
        )


def _conf(spec: pb.JobSpec, shutdown_timeout: float) -> RendezvousConf:
    least = spec.min_nodes or 1
    nodes = least, spec.max_nodes or least
    try:
        return rendezvous_conf(dict(spec.rendezvous_settings), nodes, spec.max_restarts, shutdown_timeout)
    except RunSettingError as error:
        raise invalid("spec.rendezvous_settings", str(error)) from None


def _timer(spec: pb.JobSpec, host: HostSettings) -> Peer:
    if not spec.timer_endpoint:
        return host.timer
    try:
        parse_endpoint(spec.timer_endpoint)
    except SettingError as error:
        raise invalid("spec.timer_endpoint", str(error)) from None
    return Peer(spec.timer_endpoint, host.security)


def _command(spec: pb.JobSpec) -> tuple[str, ...]:
    program, *arguments = spec.command
    if program == AGENTS_PYTHON:
        program = host_python(spec.environment)
    return (program, *arguments)


def host_python(environment: Mapping[str, str]) -> str:
    """Python for a job's workers on this host: PYTHON_EXEC, as for torchrun, or the agent's own."""
    return environment.get("PYTHON_EXEC") or sys.executable


def _workers(spec: pb.JobSpec, environment: Mapping[str, str]) -> int:
    given = _named_options(spec).get(_WORKERS)
    if given is None:
        return spec.local_world_size or 1
    if spec.local_world_size:
        raise invalid("spec.options", f"{_WORKERS!r} and spec.local_world_size contradict each other")
    try:
        return _count_workers(given, environment)
    except ValueError as error:
        raise invalid("spec.options", f"{_WORKERS}: {error}") from None


def _count_workers(text: str, environment: Mapping[str, str]) -> int:
    """Number of workers for a word of `--nproc-per-node` on this host.

    Raises:
        ValueError: The number is 0, or there is no such word.
    """
    counts = {
        "cpu": lambda: len(os.sched_getaffinity(0)),
        "gpu": lambda: count_gpus(environment),
        "xpu": lambda: count_xpus(environment),
        "auto": lambda: count_gpus(environment) or len(os.sched_getaffinity(0)),
    }
    if text not in counts:
        raise ValueError(f"{text!r} is none of {', '.join(counts)}; numbers go into spec.local_world_size")
    count = counts[text]()
    if not count:
        raise ValueError(f"this host has no {text} that workers can use")
    return count


def _named_options(spec: pb.JobSpec) -> dict[str, str]:
    return {given.replace("_", "-"): value for given, value in spec.options.items()}


def _options(spec: pb.JobSpec, workers: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        name_: value for name_, value in _named_options(spec).items() if name_ != _WORKERS
    }
    for name_, field in FIELDS.items():
        if name_ in options:
            raise invalid("spec.options", f"{name_!r} has a field of its own, spec.{field}")
    found = _job_fields("spec.options", options, workers)
    for name_, field in FIELDS.items():
        if (value := _field_value(spec, field)) is not None:
            found |= _job_fields(f"spec.{field}", {name_: value}, workers)
    return found


def _field_value(spec: pb.JobSpec, field: str) -> Any:
    """Return the value of a field as an option has it; None: it is not set."""
    value = getattr(spec, field)
    if isinstance(value, Duration):
        return seconds(f"spec.{field}", value, MOST_SECONDS) if spec.HasField(field) else None  # type: ignore[arg-type]
    if is_repeated(spec.DESCRIPTOR.fields_by_name[field]):
        return tuple(value) or None
    return value or None


def _job_fields(label: str, options: Mapping[str, Any], workers: int) -> dict[str, Any]:
    try:
        return job_fields(options, workers, label=lambda option: option)
    except OptionError as error:
        raise invalid(label, str(error)) from None
