"""The needs of a job of `rallypoint run` are checked first, and an error names the flag."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.agent.job.options import job_fields
from rallypoint.agent.job.result import JobResult
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.supervisor import log_stream
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1.supervisor_service_pb2_grpc import SupervisorServiceStub
from rallypoint.launcher.launch import launch
from rallypoint.launcher.plan import ExternalService, LaunchPlan
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from rallypoint.rpc.runtime_folder import run_socket
from support.waiting import PATIENCE, until


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    """A spawner that ends with the test."""
    async with Spawner.start() as spawner:
        yield spawner


@pytest.fixture
def taken() -> Iterator[str]:
    """An address in use."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def plan(log_dir: Path, **attributes: Any) -> LaunchPlan:
    """Return the plan of a job that does nothing, unless attributes change it."""
    given: dict[str, Any] = {
        "command": ("true",),
        "environment": {"PATH": "/usr/bin:/bin"},
        "run_id": "run-1",
        "conf": {"read_timeout": str(PATIENCE)},
        "job": {"log_dir": log_dir, "shutdown_timeout": PATIENCE},
    }
    return LaunchPlan(**{**given, **attributes})


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"service": ExternalService("here")}, "--rdzv-endpoint: endpoint 'here' has no port, expected"),
        ({"timer_endpoint": "http://a:1"}, "--timer-endpoint: endpoint 'http://a:1' has a scheme"),
        ({"supervisor_address": "here"}, "--supervisor-address: 'here' is neither HOST:PORT nor unix:/path"),
        (
            {"supervisor_address": "0.0.0.0:0"},
            "--supervisor-address 0.0.0.0:0: .*refusing to serve plaintext",
        ),
        (
            {"supervisor_address": "localhost:99999"},
            "--supervisor-address localhost:99999: .*from 0 to 65535",
        ),
        ({"conf": {"join": "1"}}, "--rdzv-conf: 'join' is not a setting; known: close_timeout, "),
        (
            {"job": job_fields({"log-dir": "/proc/none"}, 1)},
            "cannot make a log directory in /proc/none: .*--log-dir",
        ),
        (
            {
                "environment": {"CUDA_VISIBLE_DEVICES": "3"},
                "local_world_size": 2,
                "job": {"virtual_local_rank": True},
            },
            "--virtual-local-rank: CUDA_VISIBLE_DEVICES=3 names 1 device for 2 workers",
        ),
        (
            {"job": job_fields({"rlimit": "nofile=1000000000000"}, 1)},
            "--rlimit: nofile=1000000000000: the agent may not raise its hard limit",
        ),
        (
            {"local_world_size": 10_000, "job": {"numa_binding": "exclusive"}},
            "--numa-binding: NUMA node 0 has .* they can't have one each",
        ),
        (
            {"service": ExternalService("nowhere.invalid:29400"), "conf": {"read_timeout": "0.2"}},
            "can't find a route to nowhere.invalid:29400: .*retried for 0.2 s",
        ),
    ],
)
async def test_invalid_settings_are_reported_in_one_line(
    spawner: Spawner, tmp_path: Path, attributes: dict[str, Any], told: str
) -> None:
    """It names the flag, and the expected form."""
    with pytest.raises(SettingError) as caught:
        await launch(plan(tmp_path, **attributes), spawner)
    assert re.match(told, str(caught.value))
    assert "\n" not in str(caught.value)


async def test_a_supervisor_port_in_use_is_reported_in_one_line(
    spawner: Spawner, tmp_path: Path, taken: str
) -> None:
    """The line has the flag and the address."""
    with pytest.raises(SettingError, match=f"--supervisor-address {taken}: {taken} is in use"):
        await launch(plan(tmp_path, supervisor_address=taken), spawner)


async def test_an_unreadable_tls_file_is_reported_in_one_line(
    spawner: Spawner, tmp_path: Path, taken: str
) -> None:
    """The line has the flag and the file, which is missing or malformed."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file, reason in ((tmp_path / "none.pem", "No such file"), (tmp_path, "directory"), (garbage, "PEM")):
        with pytest.raises(SettingError, match=f"^--tls-ca {file}.*{reason}"):
            await launch(plan(tmp_path, service=ExternalService(taken), security=ClientTLS(ca=file)), spawner)


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
async def test_a_standalone_job_needs_nothing_else(spawner: Spawner, tmp_path: Path, address: str) -> None:
    """Its rendezvous and timer services are in its own process."""
    assert (await launch(plan(tmp_path, supervisor_address=address), spawner)).exit_code == 0


async def running(started: Path, spawner: Spawner, script: str, **attributes: Any) -> asyncio.Task[JobResult]:
    """Return a job whose worker has started: a shell script that touches a file when it is ready."""
    command = ("sh", "-c", script, "worker", str(started))
    job = asyncio.create_task(launch(plan(started.parent, command=command, **attributes), spawner))
    await until(started.exists, "the worker to start")
    return job


async def test_a_client_that_follows_the_output_gets_its_end(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent waits until the client has read it, also if that takes longer than the end of the job."""
    monkeypatch.setattr(log_stream, "GATHER", 1.0)
    script = "echo the first line; touch $1; while [ ! -e $1.over ]; do sleep 0.05; done; echo the last line"
    job, pieces = await running(tmp_path / "started", spawner, script), []
    async with grpc.aio.insecure_channel(run_socket("agent", "run-1") or "") as channel:
        following = SupervisorServiceStub(channel).StreamLogs(pb.StreamLogsRequest(follow=True))
        async with asyncio.timeout(PATIENCE):
            while isinstance(piece := await following.read(), pb.StreamLogsResponse):
                pieces.append(piece.data)
                (tmp_path / "started.over").touch()
    assert pieces == [b"the first line\n", b"the last line\n"]
    assert (await job).exit_code == 0


WAIT = (
    'trap "echo INT >$1; exit" INT; trap "echo TERM >$1; exit" TERM; touch $1; while :; do sleep 0.05; done'
)


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [(signal.SIGINT, "INT"), (signal.SIGTERM, "TERM"), (signal.SIGQUIT, "TERM"), (signal.SIGHUP, "TERM")],
)
async def test_a_signal_makes_the_job_leave(
    spawner: Spawner, tmp_path: Path, number: int, passed_on: str
) -> None:
    """The exit code names it; workers get SIGINT for Ctrl-C, and SIGTERM, which they may expect, for the others."""
    started = tmp_path / "started"
    job = await running(started, spawner, WAIT)
    signal.raise_signal(number)
    assert (await job).exit_code == 128 + number
    assert started.read_text() == f"{passed_on}\n"


async def test_under_nohup_a_terminal_that_closes_stops_nothing(spawner: Spawner, tmp_path: Path) -> None:
    """A user who started the job with SIGHUP ignored wants that to stay so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = await running(tmp_path / "started", spawner, WAIT)
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        assert (await job).exit_code == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)


USR1 = 'trap "echo USR1 >$1; exit" USR1; touch $1; while :; do sleep 0.05; done'


async def test_a_users_signal_goes_on_to_the_workers(spawner: Spawner, tmp_path: Path) -> None:
    """Schedulers warn with it; the workers decide its meaning, and the job goes on."""
    started = tmp_path / "started"
    job = await running(started, spawner, USR1)
    # The worker may run before its agent has the report of its start.
    while not job.done():
        signal.raise_signal(signal.SIGUSR1)
        await asyncio.wait({job}, timeout=1.0)
    assert (await job).exit_code == 0
    assert started.read_text() == "USR1\n"


async def test_a_signal_that_is_to_end_the_job_does(spawner: Spawner, tmp_path: Path) -> None:
    """With torchrun's --signals-to-handle, the job leaves on those signals, and on no others."""
    started = tmp_path / "started"
    job = await running(started, spawner, WAIT, signals=(signal.SIGUSR1,))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.raise_signal(signal.SIGUSR1)
    assert (await job).exit_code == 128 + signal.SIGUSR1
    assert started.read_text() == "TERM\n"


async def test_each_notice_is_logged_once(
    spawner: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A flag without a meaning is never silently ignored."""
    result = await launch(plan(tmp_path, notices=("--one has no meaning", "--two has none")), spawner)
    assert result.exit_code == 0
    told = [record.getMessage() for record in caplog.records if record.name == "rallypoint.run"]
    assert [sum(notice in line for line in told) for notice in ("--one has no", "--two has")] == [1, 1]
