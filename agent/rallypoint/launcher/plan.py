"""The complete plan of a job on one host: made by the command line or by Python, run by `launch`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rallypoint.rpc.endpoint import AccessFiles, ClientSecurity

if TYPE_CHECKING:
    from pathlib import Path

    from rallypoint.agent.failures.failure import WorkerFailure
    from rallypoint.etcd.endpoint import EtcdAddress

HANDLED_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Default signals on which a job leaves its run; torchrun's."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The rendezvous service is in this process, on loopback: for a job of this host alone."""


@dataclass(frozen=True, slots=True)
class ExternalService:
    """The rendezvous service is a separate process."""

    endpoint: str


@dataclass(frozen=True, slots=True)
class Hosted:
    """The agent of one of the job's hosts serves rendezvous, as long as the job lasts.

    Attributes:
        endpoint: Its address for the other hosts.
        here: True if this agent serves; None: it does if the endpoint is an address of this host and is free.
        away: True if the endpoint may be another host's address that leads here.
    """

    endpoint: str
    here: bool | None = None
    away: bool = False


@dataclass(frozen=True, slots=True)
class Replicated:
    """The agents of some of the job's hosts serve rendezvous, as replicas over an etcd, as long as the job lasts.

    Attributes:
        etcd: The etcd; its prefix is for this run alone.
    """

    etcd: EtcdAddress


Place: TypeAlias = Embedded | ExternalService | Hosted | Replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A job, as this host runs it.

    Attributes:
        command: Program and arguments of a worker; `${local_rank}` in an argument is replaced.
        environment: Variables that workers inherit.
        service: Location of its rendezvous service.
        nodes: Fewest and most nodes of a round.
        local_world_size: Workers on this host.
        max_restarts: Restarts of failed workers, over the whole run.
        conf: Further settings of the run, by the names of `--rdzv-conf`.
        node_id: Name of this host in the run; empty: a new one.
        node_id_is_ours: True if only this host can have that name in the run: a second node of the name is refused
            instead of replacing the first.
        local_address: Address at which other hosts reach this one; empty: determined automatically.
        timer_endpoint: Address of the timer service; empty: inside this process.
        supervisor_address: Address at which SupervisorService listens; empty: a socket that is found by the run's name.
        metrics_address: Address at which Prometheus metrics are served; empty: not served.
        security: How connections to services are secured, and those to a service in this process.
        access: Which calls to a service in this process are refused, if it listens for other hosts.
        signals: Signals on which the job leaves its run. Empty if the caller handles signals.
        job: Further fields of JobConfig, as `rallypoint.agent.job.options.job_fields` makes them.
        notices: Requested settings that have no meaning here, to be logged once; one line each.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    run_id: str
    service: Place = field(default_factory=Embedded)
    nodes: tuple[int, int] = (1, 1)
    local_world_size: int = 1
    max_restarts: int = 0
    conf: Mapping[str, str] = field(default_factory=dict)
    node_id: str = ""
    node_id_is_ours: bool = False
    local_address: str = ""
    timer_endpoint: str = ""
    supervisor_address: str = ""
    metrics_address: str = ""
    security: ClientSecurity = None
    access: AccessFiles = field(default_factory=AccessFiles)
    signals: tuple[int, ...] = HANDLED_SIGNALS
    job: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The request of a launching program to its agent.

    Attributes:
        folder: Folder with the call that workers make; None for a program.
        forkserver: True if workers are forks of a process that has loaded the call.
        log_level: Level of the agent's own log.
    """

    plan: LaunchPlan
    folder: Path | None = None
    forkserver: bool = False
    log_level: str = "warning"


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """The outcome of a launch.

    Attributes:
        exit_code: Exit code that `rallypoint run` would have.
        detail: One sentence.
        refused: True if the job could not be started as requested.
        failure: The failure that ended the run, on any of its hosts.
        report: The failure as text for people, several lines.
        ranks: Global ranks of this host's workers in the last round.
        others: Other failures of that round on this host, in order of time.
    """

    exit_code: int
    detail: str
    refused: bool = False
    failure: WorkerFailure | None = None
    report: str = ""
    ranks: tuple[int, ...] = ()
    others: tuple[WorkerFailure, ...] = ()
