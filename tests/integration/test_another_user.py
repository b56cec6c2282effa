"""At default settings another user of the host can reach no service, regardless of how it was started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from support.etcd_server import NEEDS_ETCD, EtcdCluster
from support.mortal import mortal
from support.stranger import methods
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

ANOTHER_SECRET = "the secret of another user of this host"  # noqa: S105
ROLES = ("rendezvous", "timer", "agent")
CONF = ("--rdzv-conf", "last_call_timeout=0")
SLEEP = ("--no-python", "sleep", "600")


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command at default settings, with its own runtime folder, and kill it at the end."""
    environment = clean_environment(RALLYPOINT_RUNTIME_DIR=str(folder / "r"), RALLYPOINT_LEARNED="none")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            mortal(str(RALLYPOINT), *arguments), stderr=log, stdout=log, env=environment, cwd=folder
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)


def outcomes(endpoint: str, secret: str = "") -> dict[str, str]:
    """Call all methods as another user; return the status of each."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    order = json.dumps({"endpoint": endpoint, "secret": secret})
    result = subprocess.run(
        [sys.executable, "-m", "support.stranger", order],
        capture_output=True,
        text=True,
        env=clean_environment(PYTHONPATH=str(Path(__file__).parents[1])),
        timeout=4 * PATIENCE,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    told: dict[str, str] = json.loads(result.stdout)
    return told


def listeners(process: subprocess.Popen[bytes]) -> set[tuple[str, int]]:
    """Return the TCP addresses at which a process and its children listen."""
    family = psutil.Process(process.pid)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for each in (family, *family.children(recursive=True))
        for connection in each.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def assert_closed_to_others(folder: Path) -> None:
    """Check that another user can reach none of the sockets in the runtime folder."""
    sockets = [*(folder / "r").glob("*.sock")]
    assert sockets
    for path in sockets:
        assert outcomes(f"unix:{path}") == dict.fromkeys(methods(), "UNAVAILABLE")


@pytest.mark.parametrize("role", ROLES)
def test_a_service_is_out_of_reach(tmp_path_factory: pytest.TempPathFactory, role: str) -> None:
    """It has a socket that the kernel protects from other users, and no port."""
    folder = tmp_path_factory.mktemp("s")
    folder.chmod(0o755)
    journal = ("--journal", "memory") if role == "rendezvous" else ()
    with running(folder, "serve", role, *journal) as process:
        wait_until((folder / "r" / f"{role}.sock").exists, "its socket")
        assert listeners(process) == set()
        assert_closed_to_others(folder)


def test_a_run_is_out_of_reach(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Its embedded services have sockets, and no ports."""
    folder = tmp_path_factory.mktemp("r")
    folder.chmod(0o755)
    with running(folder, "run", "--standalone", *SLEEP) as process:
        wait_until(lambda: b"starting workers" in (folder / "log").read_bytes(), "its workers")
        assert listeners(process) == set()
        assert_closed_to_others(folder)


def test_a_submitted_job_is_out_of_reach(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The agent serves its rendezvous and its timers at its sockets, without a port."""
    folder = tmp_path_factory.mktemp("j")
    folder.chmod(0o755)
    with running(folder, "serve", "agent") as process:
        socket = folder / "r" / "agent.sock"
        wait_until(socket.exists, "its socket")
        submitted = rallypoint("submit", "--agents", f"unix:{socket}", "--detach", *SLEEP)
        assert submitted.returncode == 0, submitted.stderr
        wait_until(lambda: b"starting workers" in (folder / "log").read_bytes(), "its workers")
        assert listeners(process) == set()
        assert_closed_to_others(folder)


@NEEDS_ETCD
def test_a_job_over_etcd_takes_its_own_agents_only(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdCluster
) -> None:
    """Its rendezvous has a port for other hosts, and a secret of the job that is stored only in etcd."""
    folder = tmp_path_factory.mktemp("e")
    folder.chmod(0o755)
    place = f"etcd://{etcd.endpoints}/{folder.name}"
    with running(folder, "run", "--nnodes=1:2", f"--rdzv-endpoint={place}", *CONF, *SLEEP) as process:
        wait_until(lambda: b"starting workers" in (folder / "log").read_bytes(), "its workers")
        ((_, port),) = listeners(process)
        for secret in ("", ANOTHER_SECRET):
            assert outcomes(f"127.0.0.1:{port}", secret) == dict.fromkeys(methods(), "UNAVAILABLE")
        assert_closed_to_others(folder)


@pytest.mark.parametrize("role", ROLES)
def test_a_port_on_loopback_takes_this_user_only(tmp_path_factory: pytest.TempPathFactory, role: str) -> None:
    """It rejects plaintext and other secrets, and listens only at the named address."""
    folder = tmp_path_factory.mktemp("p")
    journal = ("--journal", "memory") if role == "rendezvous" else ()
    with running(folder, "serve", role, "--host", "127.0.0.1", "--port", "0", *journal) as process:
        wait_until(lambda: bool(listeners(process)), "its port")
        ((host, port),) = listeners(process)
        assert host.removeprefix("::ffff:") == "127.0.0.1"
        for secret in ("", ANOTHER_SECRET):
            told = outcomes(f"127.0.0.1:{port}", secret)
            assert told == dict.fromkeys(methods(), "UNAVAILABLE")


@pytest.mark.parametrize("role", ROLES)
def test_plaintext_is_chosen_or_refused(tmp_path_factory: pytest.TempPathFactory, role: str) -> None:
    """With --insecure another user's calls succeed, so in the other tests security alone rejects them."""
    folder = tmp_path_factory.mktemp("i")
    journal = ("--journal", "memory") if role == "rendezvous" else ()
    with running(folder, "serve", role, "--insecure", "--port", "0", *journal) as process:
        wait_until(lambda: bool(listeners(process)), "its port")
        ((_, port),) = listeners(process)
        assert outcomes(f"127.0.0.1:{port}")["/grpc.health.v1.Health/Check"] == "OK"
