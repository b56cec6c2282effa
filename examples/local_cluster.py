"""A small cluster on this machine, of the real services and agents, each a process of its own.

    async with LocalCluster(Path("var")) as cluster:
        await cluster.start_rendezvous()
        await cluster.start_timer()
        job = Job("my-run", ("train.py", "--epochs", "30"), nodes="1:2")
        for name in ("node-0", "node-1"):
            await cluster.start_agent(name, job)
        run = await cluster.watch("my-run").until("both nodes run", lambda run: run.world_size == 4)

When the block ends, also by an exception, no process of the cluster is left.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import rallypoint.serving  # noqa: F401 (before gRPC is imported: it sets gRPC's options for this process)

# isort: split
import grpc

from programs import PATIENCE, ClusterError, Feed, Line, Program, how_it_ended
from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as agent_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel

T = TypeVar("T")

RALLYPOINT = Path(sys.executable).with_name("rallypoint")
RENDEZVOUS, TIMER = "rendezvous", "timer"

_SHUTDOWN = 5.0  # seconds that workers get between SIGTERM and SIGKILL
_GRACE = 15.0  # seconds that a program gets: an agent has to stop its workers first
# Settings of other programs, and of a cluster around this one, are removed from the environment.
_FOREIGN = ("RALLYPOINT_", "PET_", "GRPC_", "TORCHELASTIC_")
# Status codes of a stream whose server is killed or drains; and the seconds between two attempts at a new stream,
# which matter only while a draining server still replies.
_RETRYABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
_BACKOFF = 0.1


@dataclass(frozen=True, slots=True)
class Job:
    """The program of an agent.

    Attributes:
        run_id: name of the run, new for every job.
        command: a Python script and its arguments.
        nodes: as `rallypoint run --nnodes` takes it.
        workers: per agent.
        max_restarts: over the whole run.
        conf: as `--rdzv-conf` takes it.
        log_dir: in it the agents create the folder of their workers' output; None: a new temporary one.
    """

    run_id: str
    command: tuple[str, ...]
    nodes: str = "1"
    workers: int = 2
    max_restarts: int = 0
    conf: Mapping[str, str] = field(default_factory=dict)
    log_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """A run as the rendezvous service reported it, and the time of the report (Unix seconds)."""

    time: float
    run: pb.Run


class LocalCluster:
    """Starts, kills and starts again the processes of a cluster, and ends them all when its context ends.

    Attributes:
        folder: holds the journal and all logs.
        programs: all started programs by name; the latest process of each name.
        output: the output of the workers of all agents.
    """

    def __init__(self, folder: Path) -> None:
        """Set up in a folder, which is created; the logs of an earlier cluster there are removed, its journal kept."""
        self.folder = folder
        self.programs: dict[str, Program] = {}
        self.output: Feed[Line] = Feed()
        self._lock = -1
        self._failures: Feed[str] = Feed()
        self._ports: dict[str, socket.socket] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._watches: list[RunWatch] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._environment = {
            name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)
        }

    async def __aenter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ClusterError(f"another cluster runs in {self.folder}; choose another folder") from None
        for pattern in ("*.log", "*.out"):
            for old in self.folder.glob(pattern):
                old.unlink()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        finally:
            os.close(self._lock)

    # --- Processes --------------------------------------------------------------------------------------

    @property
    def rendezvous_endpoint(self) -> str:
        """The address of the rendezvous service, the same after a restart."""
        return self._endpoint(RENDEZVOUS)

    @property
    def timer_endpoint(self) -> str:
        """The address of the timer service, the same after a restart."""
        return self._endpoint(TIMER)

    async def start_rendezvous(self) -> Program:
        """Start the rendezvous service; return when it is ready. A restart uses the same port and journal."""
        return await self._start_service(RENDEZVOUS, "--journal", f"sqlite:{self.folder / 'rendezvous.db'}")

    async def start_timer(self) -> Program:
        """Start the timer service; return when it is ready. A restart uses the same port."""
        return await self._start_service(TIMER, "--learned", str(self.folder / "timer-learned.json"))

    async def start_agent(self, name: str, job: Job) -> Program:
        """Start an agent as the node of that name; return when it has joined the run."""
        timer = ["--timer-endpoint", self.timer_endpoint] if TIMER in self._ports else []
        agent = self._start(
            name,
            *["run", "--nnodes", job.nodes, "--nproc-per-node", str(job.workers)],
            *[
                "--rdzv-endpoint",
                self.rendezvous_endpoint,
                "--rdzv-id",
                job.run_id,
                "--node-id",
                name,
                *timer,
            ],
            *["--rdzv-conf", ",".join(f"{key}={value}" for key, value in job.conf.items())],
            *["--max-restarts", str(job.max_restarts), "--shutdown-timeout", str(_SHUTDOWN)],
            *["--log-dir", str(job.log_dir)] if job.log_dir is not None else [],
            # Tracebacks of workers stay in their files: stderr has the agent's records, and at the end its report.
            *["--redirects", "2", "--log-format", "json", *job.command],
        )
        await agent.log.first(f"{name} to join", lambda line: line.event == "joined")
        return agent

    async def stop(self) -> None:
        """End all processes: agents gracefully, then services; if cancelled, with SIGKILL. A second call does nothing.

        Raises:
            ClusterError: a process is still alive.
        """
        try:
            for watch in self._watches:
                await watch.close()
            for channel in self._channels.values():
                await channel.close()
            agents = [program for name, program in self.programs.items() if name not in self._ports]
            await _stop_all(agents)
            await _stop_all(self.programs.values())
        finally:
            await asyncio.gather(*(program.kill() for program in self.programs.values()))
            for reservation in self._ports.values():
                reservation.close()

    async def unless_one_fails(self, work: Coroutine[Any, Any, T]) -> T:
        """Do some work; cancel it as soon as a process fails without a request to end.

        Raises:
            ClusterError: a process failed; its errors are part of the message.
        """
        doing = asyncio.create_task(work)
        failing = asyncio.create_task(self._failures.first("a failure", lambda _: True, timeout=None))
        try:
            await asyncio.wait({doing, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not doing.done():
                raise ClusterError(failing.result())
            return doing.result()
        finally:
            doing.cancel()
            failing.cancel()
            await asyncio.gather(doing, failing, return_exceptions=True)

    async def _start_service(self, role: str, *flags: str) -> Program:
        if role not in self._ports:
            self._ports[role] = reserve_port()
        port = self._ports[role].getsockname()[1]
        service = self._start(role, "serve", role, "--port", str(port), "--log-format", "json", *flags)
        await service.log.first(f"the {role} service to be ready", lambda line: line.event == "ready")
        return service

    def _start(self, name: str, *arguments: str) -> Program:
        former = self.programs.get(name)
        if former is not None and former.running:
            raise ClusterError(f"{name} is running (pid {former.pid}); a second one would be in its way")
        output = self.output if name not in self._ports else None
        program = Program(name, [str(RALLYPOINT), *arguments], self.folder, self._environment, output)
        self.programs[name] = program
        self._tasks.append(asyncio.create_task(self._await_failure(program)))
        return program

    async def _await_failure(self, program: Program) -> None:
        code = await program.ended()
        # An agent ends with its job; a service ends on a signal.
        if not program.told_to_end and (code != 0 or program.name in self._ports):
            how, log = how_it_ended(code), self.folder / f"{program.name}.log"
            self._failures.put(f"{program.name} ended with {how}, see {log}\n{program.report}".rstrip())

    def _endpoint(self, role: str) -> str:
        return f"127.0.0.1:{self._ports[role].getsockname()[1]}"

    # --- Requests ---------------------------------------------------------------------------------------

    async def get_run(self, run_id: str) -> pb.Run:
        """Return the current run from the rendezvous service."""
        stub = pb_grpc.RendezvousServiceStub(self._channel(self.rendezvous_endpoint))
        request = pb.GetRunRequest(run_id=run_id)
        return (await _answer(stub.GetRun(request, timeout=PATIENCE, wait_for_ready=True))).run

    async def get_job(self, name: str) -> agent_pb.Job:
        """Return the current job from an agent, with the process ids of its workers."""
        ready = await self.programs[name].log.first(
            f"{name} to be ready", lambda line: line.event == "supervisor ready"
        )
        stub = agent_grpc.SupervisorServiceStub(self._channel(ready.fields["supervisor"]))
        request = agent_pb.GetJobRequest()
        return (await _answer(stub.GetJob(request, timeout=PATIENCE, wait_for_ready=True))).job

    def watch(self, run_id: str) -> RunWatch:
        """Watch an existing run: it exists once an agent has joined it."""
        watch = RunWatch(self._channel(self.rendezvous_endpoint), run_id)
        self._watches.append(watch)
        return watch

    def _channel(self, endpoint: str) -> grpc.aio.Channel:
        if endpoint not in self._channels:
            self._channels[endpoint] = open_channel(endpoint)
        return self._channels[endpoint]


class RunWatch:
    """A run's states as the rendezvous service publishes them, through any number of restarts of that service.

    Attributes:
        states: all received states. A state that lasted for less than a message takes may be missing.
    """

    def __init__(self, channel: grpc.aio.Channel, run_id: str) -> None:
        """Begin to watch."""
        self.states: Feed[Seen] = Feed()
        self._stub = pb_grpc.RendezvousServiceStub(channel)
        self._run_id = run_id
        self._following = asyncio.create_task(self._follow())

    async def until(
        self, what: str, condition: Callable[[pb.Run], bool], timeout: float | None = PATIENCE
    ) -> Seen:
        """Wait for a state of the run: the latest one or a later one.

        Args:
            `what`: the expected state, for the error.
            condition: returns True for that state.
            timeout: seconds to wait.

        Raises:
            ClusterError: no such state came.
        """
        latest = max(0, len(self.states.items) - 1)
        return await self.states.first(what, lambda seen: condition(seen.run), since=latest, timeout=timeout)

    async def close(self) -> None:
        """End the watch."""
        self._following.cancel()
        await asyncio.wait({self._following})

    async def _follow(self) -> None:
        revision = 0
        while True:
            request = pb.WatchRunRequest(run_id=self._run_id, after_revision=revision)
            try:
                run = pb.Run()
                async for response in self._stub.WatchRun(request, wait_for_ready=True):
                    run = response.run
                    revision = run.revision
                    self.states.put(Seen(time.time(), run))
                self.states.end(f"run {self._run_id} is closed: {run.run_end.detail}")
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in _RETRYABLE:
                    self.states.end(f"the rendezvous service refused: {error.details()}")
                    return
            await asyncio.sleep(_BACKOFF)


async def _answer(call: Awaitable[T]) -> T:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise ClusterError(f"asked, and got no answer: {error.details()} ({error.code().name})") from None


def reserve_port() -> socket.socket:
    """Reserve a free port, which the kernel assigns to no other socket or outgoing connection while this is open.

    A server can still listen there: this socket does not listen, and both have SO_REUSEADDR.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", 0))
    return reservation


async def _stop_all(programs: Iterable[Program]) -> None:
    await asyncio.gather(*(program.stop(_GRACE) for program in programs))
