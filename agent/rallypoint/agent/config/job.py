"""The configuration of a job on one host."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from rallypoint.agent.config.settings import (
    DRAIN_GRACE,
    EVIDENCE_TIMEOUT,
    HEALTH_TIMEOUT,
    SHUTDOWN_TIMEOUT,
    WATCHDOG_TIMEOUT,
)
from rallypoint.agent.events.handlers import EventSink
from rallypoint.agent.logs.streams import OutputOptions, Redirect
from rallypoint.rendezvous.v1.rendezvous_service_pb2 import RunSettings
from rallypoint.rpc.durations import to_seconds
from rallypoint.rpc.endpoint import ClientSecurity


@dataclass(frozen=True, slots=True)
class Peer:
    """Address of a service, and how connections to it are secured. A rendezvous service may have several addresses,
    separated by commas."""

    endpoint: str
    security: ClientSecurity = None


@dataclass(frozen=True, slots=True)
class JobConfig:
    """A job, as one host runs it. Times are in seconds.

    Attributes:
        node_id: Name of this host's agent in it.
        address: Address at which the other hosts reach this one.
        settings: Settings of the run, the same on all its nodes.
        command: Program and arguments of a worker; `${local_rank}` in an argument is replaced.
        environment: Environment of the workers, without the variables that the agent adds for each.
        local_world_size: Workers on this host.
        topology: Where this host is, from the outermost place to the innermost, as in "hall2/rack7".
        working_directory: Of the workers; None: the agent's.
        log_dir: Folder in which the folder of their output is made; None: a new temporary one.
        redirects: Streams that the console doesn't show.
        tee: Streams that the console shows with a prefix.
        connect_timeout: Limit for the first response of the rendezvous service.
        lost_timeout: Limit for a response of the rendezvous service after the connection was lost.
        close_timeout: Limit for giving the lease back.
        shutdown_timeout: How long workers may take to stop before they are killed (torchrun's
            `--shutdown-timeout`). Shorter loses checkpoints; longer keeps every other host waiting.
        stall_after: The run is reported as stalled when none of its workers advances for so long; 0: never; None: the
            setting of the timer service.
        require_watchdog: Start workers only while the timer service guards them, and leave the run when it has not for
            `watchdog_timeout`.
        watchdog_timeout: How long a job that requires a watchdog runs without one, from the moment at which its absence
            is noted. Longer survives a longer absence of the timer service; meanwhile a hung worker is not killed.
        evidence_timeout: Limit for the diagnosis of a hung worker before it is killed; 0: no diagnosis.
        virtual_local_rank: Give every worker LOCAL_RANK 0 and one visible device (torchrun's
            `--virtual-local-rank`).
        master_address: MASTER_ADDR of every round; None: the address of the node with group rank 0.
        master_port: MASTER_PORT of every round; None: a free port of that node.
        store: "tcp": the worker of rank 0 makes a TCPStore in each round; "rallypoint": each agent serves the run's
            store to its workers as a TCPStore.
        local_ranks_filter: Local ranks whose output the console shows; None: all.
        duplicate_stdout_filters: Lines of standard output with one of these texts are copied to one file for all
            workers of the host; empty: no such file.
        duplicate_stderr_filters: As `duplicate_stdout_filters`, for standard error.
        line_prefix: Template of the prefix of teed lines, with `${role_name}`, `${local_rank}`, `${rank}` and
            `${hostname}`; None: torchrun's.
        keep_attempts: How many attempts' logs are kept, the latest; 0: all.
        log_max_bytes: Size at which a log file is rotated; None: never.
        log_keep_files: How many rotated files of one stream are kept, beside the one being written.
        input_rank: Local rank of the worker that reads this process's standard input; None: all read an empty file.
        tty: That worker's output is the terminal, if this process's is.
        numa_binding: `node`, `socket`, `exclusive` or `core-complex`; None: workers run on any processor.
        call: Each worker is a fork of the spawner that calls the function loaded there (see Spawner.fork); `command`
            only names it.
        rlimits: Resource limits of the workers by name, as in {"nofile": (65536, 65536)}; -1 is no limit.
        stop_signal: First signal to workers that are stopped. After Ctrl-C it is always SIGINT.
        health_checks: Checks that must pass before the host confirms a round; rallypoint.agent.health.checks has
            their names: "disk:2%", "memory:1GiB", "gpu", "command:/opt/check".
        health_timeout: Limit for all of them together.
        maintenance_command: Program with arguments that ends with exit code 0 when maintenance of this host is
            announced; its first line of output is the reason. None: no such program.
        drain_grace: How long workers get to finish or to checkpoint when the host is drained.
        warn_signal: Signal to workers, beside the notice in a file, when the host is drained; None: no signal.
        failure_file: Second path for the machine-readable report of a failed job; the first is in `log_dir`.
        event_log: Destination of the job's events: `null`, `console`, `file:PATH`, or the name of an entry point of
            the group `rallypoint.event_sinks` (torchrun's `--event-log-handler`).
        supervisor_address: Address of the agent's SupervisorService, for the other hosts; empty: it serves none.
        event_sinks: Callables that receive the events too, such as AgentMetrics; see rallypoint.agent.events.handlers.
    """

    run_id: str
    node_id: str
    address: str
    settings: RunSettings
    command: tuple[str, ...]
    environment: Mapping[str, str]
    rendezvous: Peer
    timer: Peer
    local_world_size: int = 1
    role: str = "default"
    topology: str = ""
    working_directory: Path | None = None
    log_dir: Path | None = None
    redirects: Redirect = field(default_factory=Redirect)
    tee: Redirect = field(default_factory=Redirect)
    connect_timeout: float = 60.0
    lost_timeout: float = math.inf
    close_timeout: float = 30.0
    shutdown_timeout: float = SHUTDOWN_TIMEOUT
    stall_after: float | None = None
    require_watchdog: bool = False
    watchdog_timeout: float = WATCHDOG_TIMEOUT
    evidence_timeout: float = EVIDENCE_TIMEOUT
    virtual_local_rank: bool = False
    master_address: str | None = None
    master_port: int | None = None
    store: str = "tcp"
    local_ranks_filter: frozenset[int] | None = None
    duplicate_stdout_filters: tuple[str, ...] = ()
    duplicate_stderr_filters: tuple[str, ...] = ()
    line_prefix: str | None = None
    keep_attempts: int = 0
    log_max_bytes: int | None = None
    log_keep_files: int = 5
    input_rank: int | None = None
    tty: bool = False
    numa_binding: str | None = None
    call: bool = False
    rlimits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    stop_signal: int = signal.SIGTERM
    health_checks: tuple[str, ...] = ()
    health_timeout: float = HEALTH_TIMEOUT
    maintenance_command: tuple[str, ...] | None = None
    drain_grace: float = DRAIN_GRACE
    warn_signal: int | None = None
    failure_file: Path | None = None
    event_log: str = "null"
    supervisor_address: str = ""
    event_sinks: tuple[EventSink, ...] = ()

    @property
    def max_restarts(self) -> int | None:
        """Limit of restarts over the whole run; None: they are counted in a window."""
        settings = self.settings
        return None if to_seconds(settings.restart_window) else settings.max_restarts

    @property
    def output(self) -> OutputOptions:
        """Options for the output of its workers."""
        return OutputOptions(**{each.name: getattr(self, each.name) for each in fields(OutputOptions)})


def new_node_id() -> str:
    """A unique name for this agent: host, process and a random part.

    A host may run several agents, and containers share process ids, so no part alone is unique.
    """
    return f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(3)}"
