"""The files in docs/slurm.md, docs/systemd.md and docs/kubernetes.md work, as far as one machine can run them.

Slurm's commands are stand-ins. The command lines of units and manifests run as real processes on loopback, with the
variables, credentials and probes that the files give them.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from cli.cli_process import RALLYPOINT, clean_environment, rallypoint
from support.mortal import mortal
from support.ports import free_port
from support.processes import fresh_marker
from support.waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
SECRET = "5d" * 32
# With a file `wait` in the folder the worker trains until a checkpoint is requested; with `fail` it fails.
TRAIN = """
import os, pathlib, sys, time
from rallypoint.worker import checkpoint_saved, should_checkpoint
folder = pathlib.Path(__file__).parent
def note(event):
    with open(folder / "story", "a") as story:
        story.write(f"{event} {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n")
note("started")
if (folder / "fail").exists():
    sys.exit(1)
while (folder / "wait").exists():
    if should_checkpoint():
        note("saved")
        checkpoint_saved()
    time.sleep(0.05)
"""


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


class Machine:
    """A folder with a training script, and the processes that a test starts in it."""

    def __init__(self, folder: Path, marker: str, stack: ExitStack) -> None:
        self.folder = folder
        (folder / "train.py").write_text(TRAIN)
        self.path = f"{folder}:{RALLYPOINT.parent}:{os.environ['PATH']}"
        self._marker = marker
        self._stack = stack

    def program(self, name: str, script: str) -> None:
        """Write a program into the folder, the first in PATH."""
        (self.folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (self.folder / name).chmod(0o755)

    def start(self, *command: str, **variables: str) -> subprocess.Popen[bytes]:
        """Start a command; its output goes to a file of the folder."""
        environment = clean_environment(PATH=self.path, MARKER=self._marker, **variables)
        with (self.folder / "output").open("ab") as output:
            process = subprocess.Popen(
                mortal(*command), cwd=self.folder, env=environment, stdout=output, stderr=output
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def ends(self, process: subprocess.Popen[bytes], code: int) -> None:
        """Wait for the end of a process, and check its exit code."""
        assert process.wait(2 * PATIENCE) == code, (self.folder / "output").read_text()

    def lines(self, name: str = "story") -> list[str]:
        """Return the lines of a file, if it exists."""
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def begun(self, workers: int) -> None:
        """Wait until this number of workers has started."""
        wait_until(
            lambda: sum(line.startswith("started") for line in self.lines()) == workers,
            f"{workers} workers run",
            2 * PATIENCE,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine; no process of it is left afterwards."""
    with fresh_marker() as marker, ExitStack() as stack:
        yield Machine(tmp_path, marker, stack)


# ---- Slurm


def a_batch_job(machine: Machine, hosts: int, restarts: int = 0) -> subprocess.Popen[bytes]:
    """Start the batch file of the page as Slurm does."""
    (batch,) = blocks("slurm.md", "bash")
    port = machine.folder / "port"
    if not port.exists():
        port.write_text(str(free_port()))
    (machine.folder / "job.sh").write_text(batch.replace(":29400", f":{port.read_text()}"))
    machine.program(
        "srun",
        'while [ "${1#--}" != "$1" ]; do shift; done\n'
        f'for node in $(seq {hosts}); do "$@" & pids="$pids $!"; done\n'
        "trap 'kill $pids' TERM; for pid in $pids; do wait $pid || code=$?; done; exit ${code:-0}",
    )
    machine.program("scontrol", f'[ "$1" = show ] && echo 127.0.0.1 || echo "$@" >> {machine.folder}/asked')
    return machine.start(
        "bash",
        "job.sh",
        SLURM_NNODES=str(hosts),
        SLURM_JOB_NODELIST="host-[1-2]",
        SLURM_JOB_ID="4711",
        SLURM_RESTART_COUNT=str(restarts),
    )


def test_the_batch_file_runs_on_two_hosts(machine: Machine) -> None:
    """After its success it is not requeued."""
    machine.ends(a_batch_job(machine, 2), 0)
    assert sorted(machine.lines()) == [f"started {rank} of 4" for rank in range(4)]
    assert machine.lines("asked") == []
    assert len(list(machine.folder.glob("logs/4711/4711_*"))) == 2


@pytest.mark.slow
def test_a_batch_job_that_fails_is_requeued(machine: Machine) -> None:
    """It is requeued up to five times, and runs again with the same id."""
    (machine.folder / "fail").touch()
    machine.ends(a_batch_job(machine, 1, 5), 1)
    assert machine.lines("asked") == []
    machine.ends(a_batch_job(machine, 1), 1)
    assert machine.lines("asked") == ["requeue 4711"]
    (machine.folder / "fail").unlink()
    machine.ends(a_batch_job(machine, 1, 1), 0)


def test_a_batch_job_saves_before_the_end_of_its_time(machine: Machine) -> None:
    """It saves, ends, and is requeued."""
    (machine.folder / "wait").touch()
    job = a_batch_job(machine, 1)
    machine.begun(2)
    job.send_signal(signal.SIGUSR1)
    machine.ends(job, 143)
    assert sorted(machine.lines()[2:]) == ["saved 0 of 2", "saved 1 of 2"]
    assert machine.lines("asked") == ["requeue 4711"]


# ---- systemd


def units() -> dict[str, str]:
    """Return the units of the page by name."""
    names = re.findall(r"`/etc/systemd/system/(.*?)`", (ROOT / "docs" / "systemd.md").read_text())
    return dict(zip(names, blocks("systemd.md", "ini"), strict=True))


def test_systemd_accepts_the_units(machine: Machine) -> None:
    """systemd knows all their settings."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for name, text in units().items():
        (machine.folder / name).write_text(text.replace("/opt/rallypoint/bin/rallypoint", str(RALLYPOINT)))
        result = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", str(machine.folder / name)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert [line for line in result.stderr.splitlines() if name in line] == []
        assert result.returncode == 0, result.stderr


def test_the_units_run_a_job(machine: Machine) -> None:
    """The units' command lines, each with its credential, serve the job that the page's commands start."""
    credentials = machine.folder / "credentials"
    credentials.mkdir()
    (credentials / "run.secret").write_text(SECRET)
    (credentials / "run.secret").chmod(0o400)
    ports = {role: str(free_port()) for role in ("rendezvous", "timer", "agent")}
    started = {}
    for name, text in units().items():
        unit = configparser.ConfigParser(interpolation=None)
        unit.optionxform = str  # type: ignore[assignment,method-assign]
        unit.read_string(text.replace("%d", str(credentials)).replace("%S", str(machine.folder)))
        values = unit["Service"]
        role = name.removeprefix("rallypoint-").removesuffix(".service")
        if "StateDirectory" in values:
            (machine.folder / values["StateDirectory"]).mkdir()
        variable, _, path = values["Environment"].partition("=")
        command = shlex.split(values["ExecStart"].replace("/opt/rallypoint/bin/rallypoint", str(RALLYPOINT)))
        started[role] = machine.start(*command, "--port", ports[role], **{variable: path})
    (console,) = (block for block in blocks("systemd.md", "console") if "submit" in block)
    _, submit, status = (line.removeprefix("$ ") for line in console.splitlines())
    assert submit.startswith("rallypoint submit ")
    (machine.folder / "wait").touch()

    def here(command: str) -> list[str]:
        command = command.replace("host-a:29420,host-b:29420", f"127.0.0.1:{ports['agent']}")
        command = command.replace("head:29400", f"127.0.0.1:{ports['rendezvous']}")
        command = command.replace("head:29410", f"127.0.0.1:{ports['timer']}")
        return shlex.split(command.replace("/home/train/train.py", str(machine.folder / "train.py")))

    secret = {"RALLYPOINT_RUN_SECRET_FILE": str(credentials / "run.secret")}
    wait_until(
        lambda: sum('"ready"' in line for line in machine.lines("output")) >= len(started),
        "the units are ready",
    )
    job = machine.start(*here(submit), **secret)
    machine.begun(2)
    shown = rallypoint(*here(status)[1:], environment=secret)
    assert "run job-1: FINAL" in shown.stdout, shown.stderr
    (machine.folder / "wait").unlink()
    machine.ends(job, 0)
    for process in started.values():
        process.terminate()
        machine.ends(process, 0)


# ---- Kubernetes


class Cluster:
    """The manifests of the page; a pod is a process, and all Services are on loopback."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        documents = [each for block in blocks("kubernetes.md", "yaml") for each in yaml.safe_load_all(block)]
        self.manifests = {(each["kind"], each["metadata"]["name"]): each for each in documents}
        self.ports = {"29400": str(free_port()), "29410": str(free_port())}
        dockerfile = (ROOT / "docker" / "Dockerfile").read_text()
        self._images = dict(
            re.findall(r"^FROM role AS (\w+)\n(.*?)(?=^FROM|\Z)", dockerfile, re.MULTILINE | re.DOTALL)
        )

    def container(self, kind: str, name: str) -> Any:
        """Return the only container of a workload."""
        (container,) = self.manifests[kind, name]["spec"]["template"]["spec"]["containers"]
        return container

    def here(self, text: str) -> str:
        """Replace addresses and paths in a text of a manifest or an image by this machine's."""
        text = re.sub(r"\b(rendezvous|timer):(?=29)", "127.0.0.1:", text)
        text = re.sub(r"\b294[01]0\b", lambda port: self.ports[port[0]], text)
        text = text.replace("0.0.0.0", "127.0.0.1").replace(  # noqa: S104
            "/opt/rallypoint/", f"{ROOT}/docker/"
        )
        text = text.replace("/var/lib/rallypoint", str(self.machine.folder))
        return text.replace("/train/train.py", str(self.machine.folder / "train.py"))

    def environment(self, container: Any) -> dict[str, str]:
        """Return the variables of the image and of the manifest."""
        image = self._images[container["image"].removeprefix("rallypoint-").removesuffix(":latest")]
        values = {name: self.here(value) for name, value in re.findall(r"(RALLYPOINT_\w+)=(\S+)", image)}
        for each in container["env"]:
            source: Mapping[str, Any] = each["valueFrom"]
            if "secretKeyRef" in source:
                assert source["secretKeyRef"] == {"name": "rallypoint", "key": "run-secret"}
                values[each["name"]] = SECRET
            else:
                assert (
                    source["fieldRef"]["fieldPath"] == "metadata.labels['batch.kubernetes.io/controller-uid']"
                )
                values[each["name"]] = "4b1c7a52"
        return values

    def start(self, container: Any, **more: str) -> subprocess.Popen[bytes]:
        """Start the process of a container."""
        image = self._images[container["image"].removeprefix("rallypoint-").removesuffix(":latest")]
        (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", image, re.MULTILINE)
        values = self.environment(container) | more
        arguments = [
            re.sub(r"\$\((\w+)\)", lambda name: values[name[1]], self.here(each))
            for each in container.get("args", [])
        ]
        if "RALLYPOINT_HEALTH_ENDPOINT" in values and "run" not in arguments:
            values["RALLYPOINT_PORT"] = values["RALLYPOINT_HEALTH_ENDPOINT"].rpartition(":")[2]
        return self.machine.start(*yaml.safe_load(entry), *arguments, **values)

    def executes(self, container: Any, command: list[str], **more: str) -> subprocess.Popen[bytes]:
        """Start a command of a probe or hook in a container."""
        here = [self.here(each) for each in command]
        return self.machine.start(*here, **self.environment(container) | more)

    def is_ready(self, container: Any, probe: list[str]) -> None:
        """Wait until a probe succeeds."""
        wait_until(lambda: self.executes(container, probe).wait() == 0, "the container is ready")


@pytest.mark.slow
def test_the_manifests_run_a_job(machine: Machine) -> None:
    """Probes succeed; a deleted pod saves and leaves, and the other continues to the end."""
    machine.program("python", f'exec {sys.executable} "$@"')
    cluster = Cluster(machine)
    for kind, name in (("StatefulSet", "rendezvous"), ("Deployment", "timer")):
        service = cluster.container(kind, name)
        ports = [each["containerPort"] for each in service["ports"]]
        spec = cluster.manifests["Service", name]["spec"]
        assert (
            [each["port"] for each in spec["ports"]]
            == ports
            == [service["livenessProbe"]["tcpSocket"]["port"]]
        )
        labels = cluster.manifests[kind, name]["spec"]["template"]["metadata"]["labels"]
        assert labels == spec["selector"] == cluster.manifests[kind, name]["spec"]["selector"]["matchLabels"]
        cluster.start(service)
        probe = service["readinessProbe"]["exec"]["command"]
        cluster.is_ready(service, probe)
    job = cluster.manifests["Job", "train"]["spec"]
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    (machine.folder / "wait").touch()
    agent = cluster.container("Job", "train")
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["containerName"] == agent["name"]
    addresses = [{"RALLYPOINT_SUPERVISOR_ADDRESS": f"127.0.0.1:{free_port()}"} for _ in range(2)]
    pods = [cluster.start(agent, PET_RDZV_CONF="last_call_timeout=60", **each) for each in addresses]
    machine.begun(4)
    hook = agent["lifecycle"]["preStop"]["exec"]["command"]
    cluster.executes(agent, hook, RALLYPOINT_AGENT=addresses[0]["RALLYPOINT_SUPERVISOR_ADDRESS"])
    machine.ends(pods[0], 143)
    assert sum(line.startswith("saved") for line in machine.lines()) == 2
    (machine.folder / "wait").unlink()
    machine.ends(pods[1], 0)


def test_the_time_of_a_pod_is_enough(machine: Machine) -> None:
    """Its termination grace period covers the hook, and then the end of its workers."""
    spec = Cluster(machine).manifests["Job", "train"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    grace, pause = map(
        int, re.findall(r"(?:--grace|sleep) (\d+)", container["lifecycle"]["preStop"]["exec"]["command"][2])
    )
    assert grace < pause
    assert pause + 30 < spec["terminationGracePeriodSeconds"]
