"""The MASTER_PORT of workers is reserved for them, even on a host with other busy programs."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

WORKER = Path(__file__).with_name("meeting_worker.py")
ROBBED_WORKER = Path(__file__).with_name("robbed_worker.py")
# A host with few ephemeral ports, so that a test can take all of them.
SMALL_HOST = "ip link set lo up && echo 40000 40099 > /proc/sys/net/ipv4/ip_local_port_range"


def _in_a_small_host(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            "unshare",
            "--map-root-user",
            "--net",
            "--mount",
            "sh",
            "-c",
            f'{SMALL_HOST} && exec "$@"',
            "sh",
            *command,
        ],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_no_other_program_is_given_the_workers_port(tmp_path: Path) -> None:
    """All ephemeral ports are taken between the start of a worker and its bind, which sets no socket options. The job
    succeeds although no restart is allowed."""
    if shutil.which("unshare") is None or shutil.which("ip") is None or _in_a_small_host("true").returncode:
        pytest.skip("this machine gives no network namespace")
    result = _in_a_small_host(
        *[str(RALLYPOINT), "run", "--standalone", "--nproc-per-node", "1", "--max-restarts", "0"],
        *["--log-dir", str(tmp_path), str(WORKER)],
    )
    assert result.returncode == 0, result.stderr
    taken = re.search(r"bound after (\d+) were taken", result.stdout)
    assert taken is not None
    assert int(taken[1]) > 50


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", pytest.param("torch", marks=pytest.mark.torch)])
def test_a_port_that_was_taken_costs_no_restart(tmp_path: Path, how: str) -> None:
    """If another program binds exactly this port after the start of the worker, the job does not count it as a failure:
    it retries at once with another port, even if no restart is allowed."""
    if how == "torch":
        pytest.importorskip("torch")
    command = [str(RALLYPOINT), "run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "0"]
    command += ["--log-dir", str(tmp_path / "logs"), str(ROBBED_WORKER), str(tmp_path), how]
    with subprocess.Popen(
        mortal(*command), env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        ports = []
        with socket.socket() as thief:
            for round_ in (1, 2):
                named = tmp_path / f"port.{round_}"
                wait_until(named.exists, f"round {round_}", 60.0)
                ports.append(int(named.read_text()))
                if round_ == 1:
                    thief.bind(("127.0.0.1", ports[0]))
                    thief.listen()
                (tmp_path / f"go.{round_}").touch()
            out, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert out.splitlines()[-2:] == ["met after 0 restarts"] * 2
    assert f"another program of this host took MASTER_PORT {ports[0]} before the workers bound it" in err
    assert ports[0] != ports[1]
