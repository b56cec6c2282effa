"""What one host is to run, complete: made by the command line or by Python, carried out by `launch`."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from rallypoint.rpc.endpoint import ClientTLS

if TYPE_CHECKING:
    from pathlib import Path

    from rallypoint.agent.failures.failure import WorkerFailure
    from rallypoint.etcd.endpoint import EtcdAddress

HANDLED_SIGNALS: tuple[int, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals on which a job leaves its run, unless told otherwise; torchrun's."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """The rendezvous service is inside this process, on loopback: a job of this host alone."""


@dataclass(frozen=True, slots=True)
class ExternalService:
    """The rendezvous service stands by itself.

    Attributes:
        endpoint: Where.
    """

    endpoint: str


@dataclass(frozen=True, slots=True)
class Hosted:
    """The agent of one of the job's hosts serves rendezvous, for as long as the job lasts.

    Attributes:
        endpoint: Where the others reach it.
        here: Whether that is this agent; None: if the endpoint is an address of this host, and nobody serves there.
    """

    endpoint: str
    here: bool | None = None


@dataclass(frozen=True, slots=True)
class Replicated:
    """The agents of some of the job's hosts serve rendezvous, as replicas over an etcd, for as long as the job lasts.

    Attributes:
        etcd: Where it is, and as its prefix the place of this run alone.
    """

    etcd: EtcdAddress


Place: TypeAlias = Embedded | ExternalService | Hosted | Replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan:
    """A job, as this host is to run it.

    Attributes:
        command: Program and arguments of a worker; `${local_rank}` in an argument is replaced.
        environment: What workers inherit.
        run_id: Name of the run.
        place: Where its rendezvous service is.
        nodes: Fewest and most nodes of a round.
        local_world_size: Workers on this host.
        max_restarts: Restarts of failed workers, over the whole run.
        conf: Further settings of the run, by the names of `--rdzv-conf`.
        node_id: Name of this host in the run; empty: a new one.
        node_id_is_ours: Whether nobody but this host can rightly be in the run under that name, so that a second
            one is refused instead of replacing the first.
        local_address: Address at which other hosts reach this one; empty: found out.
        timer_endpoint: Where the timer service is; empty: inside this process.
        supervisor_address: Where SupervisorService listens.
        metrics_address: Where figures for Prometheus are served; empty: nowhere.
        tls: Certificates towards the services, and of the one that is hosted; None: plaintext.
        signals: On which the job leaves its run. Empty where somebody else handles signals.
        job: Further fields of JobConfig, as `rallypoint.agent.job.options.job_fields` makes them.
        notices: What was asked for and has no meaning here, to be told once; each one line.
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
    supervisor_address: str = "127.0.0.1:0"
    metrics_address: str = ""
    tls: ClientTLS | None = None
    signals: tuple[int, ...] = HANDLED_SIGNALS
    job: Mapping[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What an agent is to do.

    Attributes:
        plan: The job.
        folder: The call that workers make; None for a program.
        forkserver: Whether workers are forks of a process that has loaded the call.
        log_level: Of the agent's own log.
    """

    plan: LaunchPlan
    folder: Path | None = None
    forkserver: bool = False
    log_level: str = "warning"


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """How it went.

    Attributes:
        exit_code: As `rallypoint run` would end with.
        detail: One sentence.
        refused: It could not be started as asked.
        failure: The failure that ended the run, on whichever host it was.
        report: The same for people; lines.
        ranks: Global ranks that this host's workers had last.
    """

    exit_code: int
    detail: str
    refused: bool = False
    failure: WorkerFailure | None = None
    report: str = ""
    ranks: tuple[int, ...] = ()
