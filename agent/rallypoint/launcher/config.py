"""The configuration of a launch from Python: torch's LaunchConfig with its names and defaults, and further fields."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

from rallypoint.agent.job.options import idle_options, job_fields, parse_signal
from rallypoint.launcher.backends import RequestedRendezvous, is_etcd_url, resolve_rendezvous
from rallypoint.launcher.plan import LaunchPlan
from rallypoint.rendezvous.core.state import MOST_NODES, MOST_RESTARTS, MOST_WORKERS_PER_NODE
from rallypoint.rpc.endpoint import AccessFiles, ClientTLS, SettingError, client_security, run_secret

START_METHODS = ("spawn", "fork", "forkserver")

_BOUNDS = {
    "min_nodes": (1, MOST_NODES),
    "max_nodes": (1, MOST_NODES),
    "nproc_per_node": (1, MOST_WORKERS_PER_NODE),
    "max_restarts": (0, MOST_RESTARTS),
}
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass
class LaunchConfig:
    """Configuration of a job on this host.

    Names and defaults are torch's, except for the backend. Times are in seconds.

    Attributes:
        min_nodes: Fewest nodes of a round.
        max_nodes: Most nodes of a round.
        nproc_per_node: Workers on this host.
        logs_specs: Torch's DefaultLogsSpecs, for programs that make one; here the fields below do the same.
        run_id: Name of the run, the same on all its hosts; empty: a new one, of this host alone, if min_nodes is 1.
        role: Role of the workers.
            rdzv_endpoint: HOST:PORT of the rendezvous service, or an etcd:// URL; empty: a job of this host alone has
                an embedded service.
            rdzv_backend: `rallypoint`, `static`, `c10d`, `etcd` or `etcd-v2`; empty: rallypoint, or etcd for its URL.
        rdzv_configs: Settings of the run, by the names of `--rdzv-conf`; for `static` also `rank`, this node's.
        rdzv_timeout: Torch's old name of rdzv_configs["timeout"].
        max_restarts: Restarts of failed workers, over the whole run.
        monitor_interval: Accepted for compatibility; ignored.
        start_method: How workers that call a function start: `spawn`, `fork` or `forkserver`. See docs/python.md.
        log_line_prefix_template: Prefix of teed lines, with `${role_name}`, `${local_rank}`, `${rank}`, `${hostname}`.
        metrics_cfg: Has no meaning here: metrics are served at `metrics_address`.
        local_addr: Address at which other hosts reach this one; None: determined automatically.
        event_log_handler: Where events go, as `--event-log-handler` has it.
        numa_options: `node`, `socket`, `exclusive` or `core-complex`, or torch's NumaOptions; None: not bound.
        signals_to_handle: Signals on which the job leaves its run; SIGINT is always one.
        duplicate_stdout_filters: Lines that contain one of these texts are copied to one file for all workers.
        duplicate_stderr_filters: The same for standard error.
        virtual_local_rank: Give every worker LOCAL_RANK 0 and one visible device.
        shutdown_timeout: Time for workers to stop before they are killed; None: the value of the variable
            TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30.
        log_dir: Parent folder of the workers' output folder; None: a new temporary one.
        redirects: Streams not shown on the console, as `--redirects`.
        tee: Streams shown with a prefix, as `--tee`.
        local_ranks_filter: Local ranks whose output the console shows; empty: all.
        environment: Environment of the workers, without the agent's additions; None: this process's.
        node_id: Name of this host in the run; empty: a new one.
        timer_endpoint: HOST:PORT of the timer service; empty: one inside the agent.
        supervisor_address: Address at which SupervisorService listens; empty: a Unix socket of this user.
        metrics_address: Address at which Prometheus metrics are served; empty: not served.
        tls: TLS files for the services; None: RALLYPOINT_RUN_SECRET, if it is set.
        insecure: Speak and serve plaintext over TCP.
        access: Which calls to a service in this process are refused, if it listens for other hosts.
        log_level: Level of the agent's own log: debug, info, warning or error.
        options: Any other flag of `rallypoint run` by its name, as in {"rlimit": "nofile=65536"}.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int = 3
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_options: Any = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: float | None = None
    log_dir: Path | str | None = None
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: Sequence[int] = ()
    environment: Mapping[str, str] | None = None
    node_id: str = ""
    timer_endpoint: str = ""
    supervisor_address: str = ""
    metrics_address: str = ""
    tls: ClientTLS | None = None
    insecure: bool = False
    access: AccessFiles = field(default_factory=AccessFiles)
    log_level: str = "warning"
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_torch(cls, config: Any) -> LaunchConfig:
        """Return torch's LaunchConfig as one of ours.

        Raises:
            ValueError: It is none, or has a field that is not supported; one line.
        """
        if not is_dataclass(config) or isinstance(config, type):
            raise ValueError(f"config: {config!r} is no LaunchConfig")
        given = {each: getattr(config, each.name) for each in fields(config)}
        ours = {each.name for each in fields(cls)}
        if unknown := [each.name for each in given if each.name not in ours and given[each] != each.default]:
            raise ValueError(f"config: {', '.join(unknown)} is not supported; leave it out")
        found = cls(**{each.name: value for each, value in given.items() if each.name in ours})
        # Torch adds its default, which is ours for each backend that has this setting.
        found.rdzv_configs = {
            key: value for key, value in found.rdzv_configs.items() if (key, value) != ("timeout", 900)
        }
        return found

    def plan(self, command: Sequence[str], *, call: bool = False) -> LaunchPlan:
        """Return the plan of the job on this host.

        Args:
            command: Program and arguments of a worker.
            call: True if workers are forks of the spawner that call a function; `command` is then its name only.

        Raises:
            ValueError: A field has a wrong value, or contradicts another; one line.
        """
        try:
            return self._plan(tuple(command), call)
        except SettingError as error:
            raise ValueError(in_our_names(str(error))) from None

    @property
    def handled_signals(self) -> tuple[int, ...]:
        """The signals of `signals_to_handle`, and SIGINT.

        Raises:
            ValueError: A signal does not exist, or can't be handled.
        """
        names = (name.strip() for name in self.signals_to_handle.split(","))
        try:
            numbers = [parse_signal(name) for name in names if name]
        except ValueError as error:
            raise ValueError(f"signals_to_handle: {error}; expected names, as in SIGTERM,SIGINT") from None
        for number in (signal.SIGKILL, signal.SIGSTOP):
            if number in numbers:
                raise ValueError(
                    f"signals_to_handle: {number.name} can't be handled by any program; leave it out"
                )
        return tuple(dict.fromkeys((*numbers, signal.SIGINT)))

    def _plan(self, command: tuple[str, ...], call: bool) -> LaunchPlan:
        self._check()
        conf = {key: str(value) for key, value in self.rdzv_configs.items()}
        if self.rdzv_timeout != -1:
            conf["timeout"] = str(self.rdzv_timeout)
        rank = conf.pop("rank", None) if self.rdzv_backend == "static" else None
        made_up = self._made_up_run_id()
        where = resolve_rendezvous(
            RequestedRendezvous(
                backend=self.rdzv_backend or None,
                endpoint=self.rdzv_endpoint,
                run_id=self.run_id or made_up,
                conf=conf,
                nodes=(self.min_nodes, self.max_nodes),
                nodes_given=True,
                node_rank=_whole("rdzv_configs['rank']", rank) if rank is not None else None,
            )
        )
        options = self._options()
        job = job_fields(options, self.nproc_per_node, label=_field)
        idle = idle_options(options, job, label=_field)
        master = {"master_address": where.master_address, "master_port": where.master_port}
        return LaunchPlan(
            command=command,
            environment=dict(os.environ if self.environment is None else self.environment),
            run_id=where.run_id,
            service=where.service,
            nodes=(self.min_nodes, self.max_nodes),
            local_world_size=self.nproc_per_node,
            max_restarts=self.max_restarts,
            conf=where.conf,
            node_id=self.node_id or where.node_id,
            node_id_is_ours=bool(where.node_id),
            local_address=self.local_addr or "",
            timer_endpoint=self.timer_endpoint,
            supervisor_address=self.supervisor_address,
            metrics_address=self.metrics_address,
            security=client_security(self.tls, run_secret(), insecure=self.insecure),
            access=self.access,
            signals=self.handled_signals,
            notices=(*(in_our_names(notice) for notice in where.notices), *self._notices(made_up), *idle),
            job={**job, **{name: value for name, value in master.items() if value is not None}, "call": call},
        )

    def _check(self) -> None:
        for name, (least, most) in _BOUNDS.items():
            _check_number(name, getattr(self, name), least, most)
        if self.min_nodes > self.max_nodes:
            raise SettingError(
                f"min_nodes={self.min_nodes}: expected 1 to max_nodes, which is {self.max_nodes}"
            )
        if self.max_nodes > 1 and not self.rdzv_endpoint and self.rdzv_backend in ("", "rallypoint"):
            raise SettingError(
                "rdzv_endpoint: a job of several hosts needs one (start it with `rallypoint serve rendezvous`); or "
                "use rdzv_backend='static' or 'c10d', whose service is in the agent of one of them"
            )
        if self.log_level not in _LOG_LEVELS:
            raise SettingError(f"log_level={self.log_level!r} is none of {', '.join(_LOG_LEVELS)}")
        for key, value in (self.environment or {}).items():
            if not (isinstance(key, str) and isinstance(value, str)):
                raise SettingError(f"environment: {_name(key)}={value!r} is not text")
        if self.start_method not in START_METHODS:
            raise SettingError(f"start_method={self.start_method!r} is none of {', '.join(START_METHODS)}")
        if getattr(self.numa_options, "should_fall_back_if_binding_fails", False):
            raise SettingError(
                "numa_options.should_fall_back_if_binding_fails is not supported: a worker that can't be bound is not "
                "started"
            )

    def _made_up_run_id(self) -> str:
        """Return a new name where torch makes one up and this host alone is enough; else an empty text."""
        named_by_backend = self.rdzv_backend in ("static", "c10d") or is_etcd_url(self.rdzv_endpoint)
        if self.run_id or self.min_nodes > 1 or not self.rdzv_endpoint or named_by_backend:
            return ""
        return f"{socket.gethostname()}-{os.urandom(8).hex()}"

    def _notices(self, made_up: str) -> list[str]:
        notices = ["metrics_cfg has no meaning here: see metrics_address"] if self.metrics_cfg else []
        if made_up and self.max_nodes > 1:
            notices.append(
                f"run_id is empty: no other host can join this run, {made_up}; give all hosts one run_id"
            )
        return notices

    def _options(self) -> dict[str, Any]:
        binding = getattr(self.numa_options, "affinity_mode", self.numa_options)
        timeout = self.shutdown_timeout
        if timeout is None:
            timeout = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # type: ignore[assignment]
        given = {
            "role": self.role,
            "log-line-prefix": self.log_line_prefix_template,
            "event-log-handler": self.event_log_handler,
            "numa-binding": getattr(binding, "value", binding),
            "duplicate-stdout-filters": self.duplicate_stdout_filters,
            "duplicate-stderr-filters": self.duplicate_stderr_filters,
            "virtual-local-rank": self.virtual_local_rank or None,
            "shutdown-timeout": timeout,
            "log-dir": self.log_dir,
            "redirects": self.redirects,
            "tee": self.tee,
            "local-ranks-filter": [str(rank) for rank in self.local_ranks_filter] or None,
            **_of_logs_specs(self.logs_specs),
            **self.options,
        }
        return {name: value for name, value in given.items() if value is not None}


def _of_logs_specs(specs: Any) -> dict[str, Any]:
    """Return the options that torch's LogsSpecs holds; it has no public way to read all of them."""
    if specs is None:
        return {}
    ranks = getattr(specs, "_local_ranks_filter", None)
    return {
        "log-dir": getattr(specs, "root_log_dir", None) or getattr(specs, "_root_log_dir", None),
        "redirects": _streams(getattr(specs, "_redirects", 0)),
        "tee": _streams(getattr(specs, "_tee", 0)),
        "local-ranks-filter": [str(rank) for rank in ranks] if ranks else None,
    }


def _streams(value: Any) -> str:
    if isinstance(value, Mapping):
        return ",".join(f"{rank}:{int(streams)}" for rank, streams in value.items()) or "0"
    return str(int(value))


def _check_number(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise SettingError(f"{name}={value!r} is not a whole number")
    if value < least:
        raise SettingError(f"{name}={value}: expected {least} or more")
    if value > most:
        raise SettingError(f"{name}={value}: the most there can be is {most}")


def _field(option: str) -> str:
    return option.replace("-", "_")


def _name(key: object) -> str:
    return key if isinstance(key, str) else repr(key)


def _whole(name: str, text: str) -> int:
    if not text.isdecimal():
        raise SettingError(f"{name}={text!r} is not a whole number")
    return int(text)


_NAMES = {"rdzv-id": "run_id", "rdzv-conf": "rdzv_configs", "node-rank": "rdzv_configs['rank']"}


def in_our_names(sentence: str) -> str:
    """Translate a sentence about flags into one about fields."""
    return re.sub(
        r"--([a-z][a-z0-9-]*)", lambda flag: _NAMES.get(flag[1], flag[1].replace("-", "_")), sentence
    )


def python_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line for the workers' Python, with unbuffered output."""
    return (os.environ.get("PYTHON_EXEC", sys.executable), "-u", *arguments)
