"""What a job of `rallypoint run` needs is looked at first, and what is missing told by the flag that asked for it."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from process_probe import until
from rallypoint.agent.processes import Spawner
from rallypoint.cli.job import run_job
from rallypoint.serving.settings import ClientTLS, SettingError


@pytest.fixture
async def spawner() -> AsyncIterator[Spawner]:
    """A spawner that ends with the test."""
    async with Spawner.start() as spawner:
        yield spawner


@pytest.fixture
def taken() -> Iterator[str]:
    """An address at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


async def run(spawner: Spawner, **flags: Any) -> int:
    """Run a job that does nothing, with the defaults of the command line for what is not given."""
    defaults: dict[str, Any] = {
        "command": ("true",),
        "environment": {"PATH": "/usr/bin:/bin"},
        "nnodes": (1, 1),
        "nproc_per_node": 1,
        "standalone": True,
        "rdzv_endpoint": "",
        "rdzv_id": "run-1",
        "rdzv_conf": {"read_timeout": "0.2"},
        "max_restarts": 0,
        "role": "default",
        "topology": "",
        "log_dir": None,
        "redirects": "0",
        "tee": "0",
        "local_addr": "",
        "shutdown_timeout": 1.0,
        "evidence_timeout": 2.0,
        "stall_after": None,
        "node_id": "",
        "timer_endpoint": "",
        "supervisor_address": "127.0.0.1:0",
        "tls": None,
    }
    return await run_job(spawner, **{**defaults, **flags})


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"standalone": False, "rdzv_endpoint": "here"},
            "--rdzv-endpoint: endpoint 'here' has no port, expected",
        ),
        ({"timer_endpoint": "http://a:1"}, "--timer-endpoint: endpoint 'http://a:1' has a scheme"),
        ({"supervisor_address": "here"}, "--supervisor-address: 'here' is not of the form HOST:PORT"),
        ({"supervisor_address": "0.0.0.0:0"}, "--supervisor-address 0.0.0.0:0: .* only on loopback"),
        (
            {"supervisor_address": "localhost:99999"},
            "--supervisor-address localhost:99999: .*from 0 to 65535",
        ),
        ({"redirects": "7"}, "--redirects 7: '7' names no stream; expected 0"),
        ({"tee": "3:1"}, "--tee 3:1: there is no local rank 3"),
        ({"log_dir": Path("/proc/none")}, "cannot make a log directory in /proc/none: .*--log-dir"),
    ],
)
async def test_what_can_not_be_done_is_told_in_one_line(
    spawner: Spawner, tmp_path: Path, flags: dict[str, Any], told: str
) -> None:
    """It names the flag, and what was expected."""
    with pytest.raises(SettingError) as caught:
        await run(spawner, **{"log_dir": tmp_path, **flags})
    assert re.match(told, str(caught.value))
    assert "\n" not in str(caught.value)


async def test_a_supervisor_port_in_use_is_told_in_one_line(
    spawner: Spawner, tmp_path: Path, taken: str
) -> None:
    """With the flag and the address."""
    with pytest.raises(SettingError, match=f"--supervisor-address {taken}: {taken} is in use"):
        await run(spawner, log_dir=tmp_path, supervisor_address=taken)


async def test_an_unreadable_tls_file_is_told_in_one_line(
    spawner: Spawner, tmp_path: Path, taken: str
) -> None:
    """With the flag and the file: missing, or not what it should be."""
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("no certificate")
    for file, reason in ((tmp_path / "none.pem", "No such file"), (tmp_path, "directory"), (garbage, "PEM")):
        with pytest.raises(SettingError, match=f"^--tls-ca {file}.*{reason}"):
            await run(
                spawner, log_dir=tmp_path, standalone=False, rdzv_endpoint=taken, tls=ClientTLS(ca=file)
            )


@pytest.mark.parametrize("address", ["127.0.0.1:0", "localhost:0"])
async def test_a_standalone_job_needs_nothing_else(spawner: Spawner, tmp_path: Path, address: str) -> None:
    """Its rendezvous and timer services are inside."""
    assert await run(spawner, log_dir=tmp_path, supervisor_address=address) == 0


async def running(started: Path, spawner: Spawner, script: str) -> asyncio.Task[int]:
    """A job whose worker has started: a shell script that touches a file when it is ready."""
    command = ("sh", "-c", script, "worker", str(started))
    job = asyncio.create_task(run(spawner, log_dir=started.parent, command=command))
    await until(started.exists, "the worker to start")
    return job


WAIT = (
    'trap "echo INT >$1; exit" INT; trap "echo TERM >$1; exit" TERM; touch $1; while :; do sleep 0.05; done'
)


@pytest.mark.parametrize(
    ("number", "passed_on"),
    [
        (signal.SIGINT, "INT"),
        (signal.SIGTERM, "TERM"),
        (signal.SIGQUIT, "TERM"),
        (signal.SIGHUP, "TERM"),
    ],
)
async def test_a_signal_makes_the_job_leave(
    spawner: Spawner, tmp_path: Path, number: int, passed_on: str
) -> None:
    """The exit code names it; workers get SIGINT for Ctrl-C, and SIGTERM, which they may expect, for the others."""
    started = tmp_path / "started"
    job = await running(started, spawner, WAIT)
    signal.raise_signal(number)
    assert await job == 128 + number
    assert started.read_text() == f"{passed_on}\n"


async def test_under_nohup_a_terminal_that_closes_stops_nothing(spawner: Spawner, tmp_path: Path) -> None:
    """Whoever started the job with SIGHUP ignored wants it to stay so."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        job = await running(tmp_path / "started", spawner, WAIT)
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGTERM)
        assert await job == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGHUP, before)
