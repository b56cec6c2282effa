"""A job that a scheduler requeues runs again with the same id: the recipe of docs/failures.md, with real processes."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint, service
from support.mortal import mortal
from support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.integration

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
JOB = "4711"
# Files in the job's folder control the worker.
WORKER = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
node = os.environ["RALLYPOINT_NODE"]
launch = os.environ.get("SLURM_RESTART_COUNT", "0")
def note(what):
    with open(folder / "story", "a") as story:
        story.write(f"{what} {launch} {os.environ['RALLYPOINT_ROUND']} {os.environ['TORCHELASTIC_RESTART_COUNT']}\\n")
if (folder / "slow").exists() and node == "b":
    def stop(*_):
        time.sleep(6)
        note("stopped")
        os._exit(0)
    signal.signal(signal.SIGTERM, stop)
note("started")
if (folder / "fail").exists() and node != "b":
    sys.exit(1)
while (folder / "wait").exists() or (folder / "fail").exists():
    time.sleep(0.02)
"""


class Slurm:
    """A folder with the batch script of the page, and with stand-ins for the programs of Slurm."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        (script,) = re.findall(r"```bash\n(#SBATCH --requeue\n.*?)```", PAGE.read_text(), re.DOTALL)
        options = f"--insecure --rdzv-endpoint {address} --log-level warning"
        (folder / "job.sh").write_text(script.replace("... train.py", f"{options} worker.py {folder}"))
        (folder / "worker.py").write_text(WORKER)
        tools = folder / "bin"
        tools.mkdir()
        self._tool(tools / "srun", 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"')
        for name in ("scontrol", "sbatch"):
            self._tool(tools / name, f'echo {name} "$@" >> {folder}/asked')
        self._path = f"{tools}:{RALLYPOINT.parent}:{os.environ['PATH']}"
        self._started: list[subprocess.Popen[str]] = []

    @staticmethod
    def _tool(path: Path, script: str) -> None:
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def start(self, restarts: int) -> subprocess.Popen[str]:
        """Start the job, as Slurm does after `restarts` requeues."""
        environment = clean_environment(
            PATH=self._path, SLURM_JOB_ID=JOB, SLURM_RESTART_COUNT=str(restarts), SLURMD_NODENAME="host"
        )
        command = mortal("bash", str(self.folder / "job.sh"))
        self._started.append(
            subprocess.Popen(command, cwd=self.folder, env=environment, text=True, start_new_session=True)
        )
        return self._started[-1]

    def run(self, restarts: int) -> int:
        """Run the job to its end; return its exit code."""
        return self.start(restarts).wait(PATIENCE)

    def lines(self, name: str) -> list[str]:
        """Return the lines of `story`, which workers write, or of `asked`, the calls of Slurm's programs."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A rendezvous service that outlives the job."""
    with service("rendezvous", "--insecure", "--journal", f"sqlite:{tmp_path}/journal.db") as address:
        yield address


@pytest.fixture
def slurm(tmp_path: Path, address: str) -> Iterator[Slurm]:
    slurm = Slurm(tmp_path, address)
    yield slurm
    slurm.close()


def test_a_job_that_failed_is_requeued_and_runs_again(slurm: Slurm, address: str) -> None:
    """It has all its restarts again, and a higher round number; after a success it does not run again."""
    (slurm.folder / "fail").touch()
    assert slurm.run(0) == 0
    assert slurm.lines("asked") == [f"scontrol requeue {JOB}"]
    (slurm.folder / "fail").unlink()
    assert slurm.run(1) == 0
    assert slurm.lines("story") == ["started 0 1 0", "started 1 2 0"]
    (slurm.folder / "never.py").touch()
    again = rallypoint(
        "run", "--insecure", "--rdzv-endpoint", address, "--rdzv-id", JOB, slurm.folder / "never.py"
    )
    assert again.returncode == 4
    assert "is closed (SUCCEEDED" in again.stderr
    assert slurm.run(2) == 0
    assert len(slurm.lines("story")) == 2
    assert len(slurm.lines("asked")) == 1


@pytest.mark.slow
def test_a_job_that_fails_each_time_is_not_requeued_for_ever(slurm: Slurm) -> None:
    """The recipe has a limit."""
    (slurm.folder / "fail").touch()
    assert slurm.run(5) == 1
    assert slurm.lines("asked") == []


def test_a_job_that_runs_is_requeued(slurm: Slurm) -> None:
    """Slurm ends it with SIGTERM, and may restart it while its agent is still leaving."""
    (slurm.folder / "wait").touch()
    first = slurm.start(0)
    wait_until(lambda: len(slurm.lines("story")) == 1, "the worker runs")
    os.killpg(first.pid, signal.SIGTERM)
    second = slurm.start(1)
    wait_until(lambda: len(slurm.lines("story")) == 2, "the worker runs again")
    (slurm.folder / "wait").unlink()
    assert second.wait(PATIENCE) == 0
    first.wait(PATIENCE)
    assert slurm.lines("story") == ["started 0 1 0", "started 1 2 0"]


@pytest.mark.slow
def test_it_starts_when_the_last_agent_of_the_closed_run_has_gone(tmp_path: Path, address: str) -> None:
    """One host ends at once, another needs time to stop its worker: two launches of the job never overlap."""
    for name in ("fail", "slow"):
        (tmp_path / name).touch()
    (tmp_path / "worker.py").write_text(WORKER)
    started: list[subprocess.Popen[bytes]] = []

    def start(node: str, nodes: int, launch: int) -> subprocess.Popen[bytes]:
        flags = ["--insecure", "--rdzv-endpoint", address, "--rdzv-id", JOB, "--nnodes", str(nodes)]
        command = mortal(str(RALLYPOINT), "run", *flags, "--node-id", node, "worker.py", str(tmp_path))
        environment = clean_environment(SLURM_RESTART_COUNT=str(launch))
        with (tmp_path / f"{node}.err").open("w") as err:
            started.append(subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=err))
        return started[-1]

    def story() -> list[str]:
        path = tmp_path / "story"
        return path.read_text().splitlines() if path.exists() else []

    try:
        first = [start("a", 2, 0), start("b", 2, 0)]
        assert first[0].wait(PATIENCE) == 1
        (tmp_path / "fail").unlink()
        second = start("c", 1, 1)
        assert second.wait(PATIENCE) == 0
        assert first[1].wait(PATIENCE) == 1
        assert sorted(story()[:2]) == ["started 0 1 0", "started 0 1 0"]
        assert story()[2:] == ["stopped 0 1 0", "started 1 2 0"]
        assert "did not leave yet" in (tmp_path / "c.err").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
