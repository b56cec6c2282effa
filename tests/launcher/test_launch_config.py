"""Torch's LaunchConfig leads to the same plan as the flags of the same names, and errors name the field."""

from __future__ import annotations

import dataclasses
import os
import pickle
import signal
from enum import Enum, IntFlag
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.logs.streams import Redirect, Streams
from rallypoint.launcher.config import LaunchConfig
from rallypoint.launcher.plan import Embedded, ExternalService, Hosted, LaunchPlan


def plan(**fields: Any) -> LaunchPlan:
    return LaunchConfig(**{"min_nodes": 1, "max_nodes": 1, "nproc_per_node": 2, **fields}).plan(["train"])


def test_defaults_are_torchs() -> None:
    """Three restarts, no redirects, torch's name of the role; a job of one host needs nothing else."""
    found = plan()
    assert found.command == ("train",)
    assert (found.nodes, found.local_world_size, found.max_restarts) == ((1, 1), 2, 3)
    assert isinstance(found.service, Embedded)
    assert found.job["role"] == "default_role"
    assert found.environment == dict(os.environ)
    assert found.notices == ()
    assert set(found.signals) == {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
    assert plan().run_id != found.run_id
    assert pickle.loads(pickle.dumps(found)) == found, "it goes to the agent's process"  # noqa: S301


def test_fields_have_torchs_order() -> None:
    """Positional arguments have the meaning that they have in torch."""
    names = [field.name for field in dataclasses.fields(LaunchConfig)]
    assert names[:6] == ["min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role"]
    assert names.index("shutdown_timeout") == 22


@pytest.mark.torch
def test_every_field_of_torchs_is_here() -> None:
    """It has its name, its position, and its default except for the backend."""
    Torchs = pytest.importorskip("torch.distributed.launcher.api").LaunchConfig

    torchs = {field.name: field.default for field in dataclasses.fields(Torchs)}
    ours = {field.name: field.default for field in dataclasses.fields(LaunchConfig)}
    assert list(ours)[: len(torchs)] == list(torchs)
    assert [name for name in torchs if torchs[name] != ours[name]] == ["rdzv_backend"]


def test_every_field_reaches_the_plan() -> None:
    """Fields that don't concern the rendezvous are options of the job."""
    found = plan(
        min_nodes=2,
        max_nodes=4,
        run_id="run",
        rdzv_endpoint="meet:29400",
        rdzv_configs={"join_timeout": 60, "last_call_timeout": 1.5},
        max_restarts=0,
        log_line_prefix_template="[${rank}]",
        local_addr="10.0.0.1",
        numa_options="node",
        signals_to_handle="SIGTERM,USR1",
        duplicate_stdout_filters=["loss"],
        duplicate_stderr_filters=["warn", "error"],
        shutdown_timeout=7,
        log_dir="logs",
        redirects="1",
        tee="0:2",
        local_ranks_filter=[1],
        environment={"A": "b"},
        node_id="me",
        timer_endpoint="watch:29410",
        metrics_address="127.0.0.1:0",
        options={"rlimit": "core=0", "stop-signal": "USR2"},
    )
    assert (found.nodes, found.run_id, found.service) == ((2, 4), "run", ExternalService("meet:29400"))
    assert found.conf == {"join_timeout": "60", "last_call_timeout": "1.5"}
    assert found.max_restarts == 0
    assert (found.local_address, found.node_id, found.environment) == ("10.0.0.1", "me", {"A": "b"})
    assert (found.timer_endpoint, found.metrics_address) == ("watch:29410", "127.0.0.1:0")
    assert found.signals == (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    expected = {
        "line_prefix": "[${rank}]",
        "numa_binding": "node",
        "duplicate_stdout_filters": ("loss",),
        "duplicate_stderr_filters": ("warn", "error"),
        "shutdown_timeout": 7.0,
        "log_dir": Path("logs"),
        "redirects": Redirect(Streams.STDOUT),
        "local_ranks_filter": {1},
        "rlimits": {"core": (0, 0)},
        "stop_signal": signal.SIGUSR2,
        "call": False,
    }
    assert {name: found.job[name] for name in expected} == expected


class Std(IntFlag):
    """The same as torch's."""

    OUT = 1
    ERR = 2


class AffinityMode(str, Enum):  # noqa: UP042
    """The same as torch's."""

    SOCKET = "socket"


@dataclasses.dataclass
class NumaOptions:
    """The same as torch's."""

    affinity_mode: AffinityMode
    should_fall_back_if_binding_fails: bool = False


class LogsSpecs:
    """The same as torch's."""

    root_log_dir = "elsewhere"
    _redirects = Std.OUT
    _tee: dict[int, Std] = {0: Std.ERR, 1: Std.OUT}  # noqa: RUF012 (like that)
    _local_ranks_filter: set[int] = {0}  # noqa: RUF012


def test_torchs_own_objects_are_understood() -> None:
    """A program that creates DefaultLogsSpecs and NumaOptions need not change."""
    found = plan(logs_specs=LogsSpecs(), numa_options=NumaOptions(AffinityMode.SOCKET))
    assert found.job["log_dir"] == Path("elsewhere")
    assert found.job["redirects"] == Redirect(Streams.STDOUT)
    assert found.job["tee"] == Redirect.parse("0:2,1:1", "tee", 2)
    assert found.job["local_ranks_filter"] == {0}
    assert found.job["numa_binding"] == "socket"


def test_torchs_static_backend_has_its_rank_in_the_settings() -> None:
    """torchrun passes it there."""
    found = plan(
        min_nodes=2,
        max_nodes=2,
        rdzv_backend="static",
        rdzv_endpoint="first:29500",
        run_id="run",
        rdzv_configs={"rank": 1, "timeout": 900},
    )
    assert isinstance(found.service, Hosted)
    assert found.node_id == "rank1"
    assert found.job["master_address"] == "first"
    assert found.job["master_port"] == 29500


def test_the_old_names_of_timeouts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are torch's environment variable for the shutdown, and torch's first name for the rendezvous timeout."""
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "11")
    assert plan().job["shutdown_timeout"] == 11.0
    assert plan(shutdown_timeout=3).job["shutdown_timeout"] == 3.0
    found = plan(rdzv_timeout=5, rdzv_backend="static", rdzv_configs={"rank": 0})
    assert found.conf["join_timeout"] == "5"


@pytest.mark.parametrize("backend", ["", "rallypoint", "etcd"])
def test_a_run_id_is_made_up_where_one_host_is_enough(backend: str) -> None:
    """It is a new one each time, as in torch; a notice is given if several hosts were expected, as none can join."""
    fields: dict[str, Any] = {"rdzv_backend": backend, "rdzv_endpoint": "meet:29400"}
    alone = plan(**fields)
    assert alone.run_id
    assert alone.run_id != plan(**fields).run_id
    assert alone.notices == ()
    elastic = plan(max_nodes=4, **fields)
    assert [notice.split(":")[0] for notice in elastic.notices] == ["run_id is empty"]
    assert elastic.run_id in elastic.notices[0]


@dataclasses.dataclass
class TorchsConfig:
    """The same as torch's: its default of the timeout is in rdzv_configs."""

    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int = 2
    logs_specs: Any = dataclasses.field(default_factory=LogsSpecs)
    rdzv_configs: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"timeout": 900, "join_timeout": 7}
    )
    future: int = 0


def test_torchs_config_is_accepted_here() -> None:
    """Its default timeout is no setting of the user's; a field of a newer torch must have its default."""
    found = LaunchConfig.from_torch(TorchsConfig()).plan(["train"])
    assert (found.conf, found.notices, found.job["log_dir"]) == ({"join_timeout": "7"}, (), Path("elsewhere"))
    with pytest.raises(ValueError, match="config: future is not supported; leave it out"):
        LaunchConfig.from_torch(TorchsConfig(future=1))
    for wrong in (None, LaunchConfig):
        with pytest.raises(ValueError, match="is no LaunchConfig"):
            LaunchConfig.from_torch(wrong)


def test_fields_without_a_meaning_are_reported() -> None:
    """The agent logs a notice, with the names of the fields."""
    notices = plan(metrics_cfg={"a": "b"}, rdzv_configs={"timeout": 900}).notices
    assert [notice.split(" has no meaning")[0] for notice in notices] == [
        "rdzv_configs: timeout",
        "metrics_cfg",
    ]
    assert plan(options={"log-keep-files": 3}).notices == (
        "log_keep_files has no meaning without log_max_size: files of any size are not rotated",
    )
    assert plan(log_line_prefix_template="x", tee="0").notices == (
        "log_line_prefix has no meaning without tee: only lines that are teed have a prefix",
    )
    assert plan(log_line_prefix_template="x", tee="1", options={"log_max_size": 9999}).notices == ()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"min_nodes": 2}, "min_nodes=2: expected 1 to max_nodes, which is 1"),
        ({"nproc_per_node": 0}, "nproc_per_node=0: expected 1 or more"),
        ({"max_restarts": -1}, "max_restarts=-1: expected 0 or more"),
        ({"start_method": "thread"}, "start_method='thread' is none of spawn, fork, forkserver"),
        ({"shutdown_timeout": -1}, "shutdown_timeout: -1"),
        ({"signals_to_handle": "SIGTERM,SIGNAL"}, "signals_to_handle: 'SIGNAL' is no signal; expected names"),
        ({"numa_options": "near"}, "numa_binding: 'near' is none of node, socket"),
        ({"numa_options": NumaOptions(AffinityMode.SOCKET, True)}, "should_fall_back_if_binding_fails"),
        ({"rdzv_backend": "zookeeper"}, "rdzv_backend: 'zookeeper' is not a backend"),
        ({"max_nodes": 2}, "rdzv_endpoint: a job of several hosts needs one.*; or use rdzv_backend='static'"),
        ({"nproc_per_node": "2"}, "nproc_per_node='2' is not a whole number"),
        ({"max_restarts": True}, "max_restarts=True is not a whole number"),
        ({"nproc_per_node": 100_000}, "nproc_per_node=100000: the most there can be is 16384"),
        ({"max_nodes": 10**9}, "max_nodes=1000000000: the most there can be is"),
        ({"max_restarts": 10**9}, "max_restarts=1000000000: the most there can be is 1000000"),
        (
            {"signals_to_handle": "SIGTERM,SIGKILL"},
            "signals_to_handle: SIGKILL can't be handled by any program",
        ),
        ({"log_level": "loud"}, "log_level='loud' is none of debug, info, warning, error"),
        ({"environment": {"STEPS": 1}}, "environment: STEPS=1 is not text"),
        ({"environment": {1: "a"}}, "environment: 1='a' is not text"),
        ({"min_nodes": 2, "max_nodes": 2, "rdzv_endpoint": "a:1"}, "Give run_id NAME"),
        ({"local_ranks_filter": [7]}, "local_ranks_filter: .*has 7, but this host has 2 workers"),
        ({"options": {"nonsense": 1}}, "nonsense: there is no such option"),
        (
            {"rdzv_backend": "static", "rdzv_configs": {"rank": "x"}},
            "rdzv_configs.'rank'.='x' is not a whole number",
        ),
    ],
)
def test_mistakes_are_reported_in_one_line(fields: dict[str, Any], expected: str) -> None:
    """The error comes before anything is started, with the field's name rather than a flag's."""
    with pytest.raises(ValueError, match=expected) as caught:
        plan(**fields)
    assert "\n" not in str(caught.value)
    assert "--" not in str(caught.value).replace("`rallypoint", "")
