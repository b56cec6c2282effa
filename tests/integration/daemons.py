"""Agents that run as daemons, in processes of their own, and the commands of users that run jobs on them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from cli.cli_process import RALLYPOINT, clean_environment
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.endpoint import parse_endpoint
from rallypoint.rpc.tls import ClientCredentials
from support.mortal import mortal
from support.processes import fresh_marker
from support.waiting import PATIENCE, wait_until

WORKER = Path(__file__).with_name("submitted_worker.py")


@dataclass
class Started:
    """A program that was started, with its output in files."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def printed(self) -> str:
        """Its standard output so far."""
        return self.out.read_text(errors="replace")

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return self.err.read_text(errors="replace")

    def ended(self) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(PATIENCE)


@dataclass
class Host:
    """A daemon.

    Attributes:
        program: its process.
        address: the address of its service.
    """

    program: Started
    address: str

    def job(self, run_id: str = "") -> pb.Job:
        with users_channel(self.address) as channel:
            request = pb.GetJobRequest(run_id=run_id)
            job: pb.Job = pb_grpc.SupervisorServiceStub(channel).GetJob(request, timeout=PATIENCE).job
            return job


@dataclass
class Cluster:
    """Daemons, and the commands of a user.

    Attributes:
        folder: for all files.
        marker: in the environment of every started process.
        hosts: the daemons.
    """

    folder: Path
    marker: str
    stack: ExitStack
    hosts: list[Host] = field(default_factory=list)
    _count: int = 0

    def start(self, *arguments: str | Path) -> Started:
        """Start a command of `rallypoint`; it ends with the test."""
        self._count += 1
        out, err = (self.folder / f"{self._count}.{name}" for name in ("out", "err"))
        environment = clean_environment(MARKER=self.marker, PYTHONUNBUFFERED="1")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                mortal(str(RALLYPOINT), *map(str, arguments)), stdout=stdout, stderr=stderr, env=environment
            )
        self.stack.callback(_end, process)
        return Started(process, out, err)

    def run(self, *arguments: str | Path) -> Started:
        """Run a command of `rallypoint` to its end."""
        started = self.start(*arguments)
        started.ended()
        return started

    def serve(self, count: int, *arguments: str) -> None:
        """Start daemons; return when they serve."""
        command = ("serve", "agent", "--port", "0", "--log-format", "json", *arguments)
        for program in [self.start(*command) for _ in range(count)]:
            wait_until(lambda: bool(_address(program)) or program.process.poll() is not None, "the daemon")  # noqa: B023 (called at once)
            assert _address(program), program.said
            self.hosts.append(Host(program, _address(program)))

    def submit(self, *order: str, flags: tuple[str | Path, ...] = ()) -> Started:
        """Submit a job to all hosts; its workers follow an order."""
        agents = ",".join(host.address for host in self.hosts)
        return self.start("submit", "--agents", agents, *flags, WORKER, self.folder, *order)

    def up(self, *ranks: int, restarts: int = 0) -> None:
        """Wait until the workers of these ranks run."""
        for rank in ranks:
            wait_until((self.folder / f"up.{rank}.{restarts}").exists, f"rank {rank}")


def users_channel(address: str) -> grpc.Channel:
    """Open a synchronous channel to a service on loopback, with the user secret."""
    credentials, name = ClientCredentials(None).of(parse_endpoint(address))
    assert credentials is not None
    return grpc.secure_channel(address, credentials, [("grpc.ssl_target_name_override", name)])


@contextmanager
def cluster(folder: Path, hosts: int = 2, *arguments: str) -> Iterator[Cluster]:
    """Run daemons; a marker identifies all their processes, and none of them is left afterwards."""
    with fresh_marker() as marker, ExitStack() as stack:
        made = Cluster(folder, marker, stack)
        made.serve(hosts, *arguments)
        yield made


def _address(program: Started) -> str:
    for line in program.said.splitlines():
        record = json.loads(line) if line.startswith("{") else {}
        if record.get("event") == "ready" and record["services"][0].startswith("rallypoint.agent"):
            return str(record["address"])
    return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def interrupt(program: Started) -> None:
    """Send SIGINT, as Ctrl-C does."""
    os.kill(program.process.pid, signal.SIGINT)
