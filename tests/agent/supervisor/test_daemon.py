"""A standalone agent runs as many jobs as it has room for, refuses others, and ends its jobs when it ends."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.spawner.protocol import SpawnError
from rallypoint.agent.supervisor.daemon import Daemon
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.launcher.services import embedded_rendezvous, embedded_timer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS, ServerOptions
from rallypoint.rpc.errors import ServiceError, decode
from rallypoint.serving.server import Server
from support.processes import fresh_marker, gone
from support.waiting import PATIENCE, until


class Host:
    """A running daemon, and the services that its jobs need."""

    def __init__(
        self, folder: Path, rendezvous: str, stub: pb_grpc.SupervisorServiceAsyncStub, marker: str
    ) -> None:
        self.folder, self.rendezvous, self.stub, self.marker = folder, rendezvous, stub, marker

    def spec(self, script: str, **more: Any) -> pb.JobSpec:
        """A job that runs a shell script, whose first argument is the test's folder."""
        fields = {
            "run_id": "run-1",
            "rendezvous_endpoint": self.rendezvous,
            "command": ["sh", "-c", script, self.marker, str(self.folder)],
            "log_dir": str(self.folder / "logs"),
            **more,
        }
        return pb.JobSpec(**fields)

    async def launch(self, script: str, **more: Any) -> str:
        """Launch a job; return the name of its node."""
        return (await self.stub.LaunchJob(self.request(script, **more))).node_id

    def request(self, script: str, launch_id: str = "", **more: Any) -> pb.LaunchJobRequest:
        """A request to launch a job."""
        return pb.LaunchJobRequest(spec=self.spec(script, **more), launch_id=launch_id)

    async def refused(self, script: str = "exit 0", **more: Any) -> ServiceError:
        """Return the error with which a job is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.launch(script, **more)
        return decode(caught.value)

    async def ended(self, run_id: str = "") -> pb.Job:
        """Wait for the end of a job; return the job."""
        job = pb.Job()
        async with asyncio.timeout(PATIENCE):
            async for response in self.stub.WatchJob(pb.WatchJobRequest(run_id=run_id)):
                job = response.job
        assert job.state == pb.JOB_STATE_ENDED
        return job


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A daemon inside this process; no worker outlives it."""
    with fresh_marker() as marker:
        async with AsyncExitStack() as stack:
            rendezvous = await stack.enter_async_context(embedded_rendezvous())
            timer = await stack.enter_async_context(embedded_timer())
            environment = {"PATH": os.environ["PATH"], "FROM": "the daemon"}
            daemon = await stack.enter_async_context(Daemon(timer, None, environment, max_jobs=2))
            server = Server(ServerOptions(), services=[daemon.registration])
            await server.start()
            stack.push_async_callback(server.stop)
            channel = await stack.enter_async_context(open_channel(server.address))
            yield Host(tmp_path, rendezvous, pb_grpc.SupervisorServiceStub(channel), marker)
        assert gone(marker)


async def test_a_job_is_run_as_it_was_specified(host: Host) -> None:
    """Its folder, number of workers, role and environment are as requested; its result is reported."""
    script = 'echo "$FROM $MARK $RANK $WORLD_SIZE $ROLE_NAME $RALLYPOINT_NODE $PWD" > $1/seen.$RANK'
    node_id = await host.launch(
        script,
        node_id="node-7",
        local_world_size=2,
        role="reader",
        environment={"MARK": "x"},
        working_directory=str(host.folder),
    )
    assert node_id == "node-7"
    job = await host.ended()
    assert (job.exit_code, job.detail) == (0, "all 2 workers of round 1 succeeded")
    assert [(host.folder / f"seen.{rank}").read_text() for rank in (0, 1)] == [
        f"the daemon x {rank} 2 reader node-7 {host.folder}\n" for rank in (0, 1)
    ]


async def test_no_more_jobs_run_than_there_is_room_for(host: Host) -> None:
    """The error for one too many names the first job; after the end of a job there is room again."""
    await host.launch("touch $1/started; sleep 600")
    await host.launch("sleep 600", run_id="run-2")
    await until((host.folder / "started").exists, "the worker")
    error = await host.refused(run_id="run-3")
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_RUNNING")
    assert error.metadata == {"run_id": "run-1"}
    await host.stub.StopJob(pb.StopJobRequest(run_id="run-1", reason="make room"))
    assert (await host.ended("run-1")).detail == "left the run: stopped through SupervisorService: make room"
    await host.launch("exit 0", run_id="run-3")
    assert (await host.ended("run-3")).exit_code == 0
    jobs = (await host.stub.ListJobs(pb.ListJobsRequest())).jobs
    assert [(job.run_id, job.state == pb.JOB_STATE_ENDED) for job in jobs] == [
        ("run-3", True),
        ("run-2", False),
        ("run-1", True),
    ]


async def test_a_run_has_one_job_of_a_host(host: Host) -> None:
    """A second job of the same run would be a second node of the host, with the same devices."""
    await host.launch("sleep 600")
    error = await host.refused()
    assert (error.reason, error.metadata) == ("JOB_RUNNING", {"run_id": "run-1"})


async def test_a_launch_that_is_sent_again_launches_nothing_more(host: Host) -> None:
    """Its launch_id identifies it, at the same time, later, and even after the job's end."""
    request = host.request("echo x >> $1/starts", launch_id="launch-1")
    first, second = await asyncio.gather(host.stub.LaunchJob(request), host.stub.LaunchJob(request))
    assert first == second
    assert (await host.ended()).launch_id == "launch-1"
    assert await host.stub.LaunchJob(request) == first
    assert (host.folder / "starts").read_text() == "x\n"
    assert len((await host.stub.ListJobs(pb.ListJobsRequest())).jobs) == 1


@pytest.mark.parametrize("run_id", ["run-1", "run-2"])
async def test_a_launch_id_is_not_for_two_jobs(host: Host, run_id: str) -> None:
    """A caller that used it twice would take another job for its own."""
    await host.stub.LaunchJob(host.request("exit 0", launch_id="launch-1"))
    error = await host.refused(run_id=run_id, script="exit 1", launch_id="launch-1")
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LAUNCH_ID_REUSED")
    assert error.metadata == {"run_id": "run-1"}


async def test_python_is_that_of_the_agent(host: Host) -> None:
    """A remote client can't know its path."""
    code = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(sys.executable)"
    spec = host.spec("", command=["${python}", "-c", code, str(host.folder / "seen")])
    await host.stub.LaunchJob(pb.LaunchJobRequest(spec=spec))
    assert (await host.ended()).exit_code == 0
    assert (host.folder / "seen").read_text() == sys.executable


async def test_flags_of_run_are_options_of_a_job(host: Host) -> None:
    """They are parsed as `rallypoint run` does; the host may choose the number of workers."""
    script = 'echo "$LOCAL_RANK" > $1/seen.$RANK'
    await host.launch(script, options={"nproc_per_node": "cpu"}, virtual_local_rank=True)
    assert (await host.ended()).world_size == len(os.sched_getaffinity(0))
    assert (host.folder / "seen.0").read_text() == "0\n"


async def test_a_daemon_that_ends_stops_its_job_gracefully(tmp_path: Path) -> None:
    """Its workers get the time to save their state, also if the job was already being stopped."""
    save = 'trap "sleep 0.3; touch $1/saved; exit" TERM; touch $1/started; while :; do sleep 0.02; done'
    async with embedded_rendezvous() as rendezvous, embedded_timer() as timer:
        async with Daemon(timer, None, {"PATH": os.environ["PATH"]}) as daemon:
            host = Host(tmp_path, rendezvous, None, "worker")  # type: ignore[arg-type]
            await daemon._launch(host.request(save))
            await until((tmp_path / "started").exists, "the worker")
            daemon.jobs.running[0].request_stop("maintenance")
            await asyncio.sleep(0.25)  # so that a second request would count as urgent
        assert (tmp_path / "saved").exists()
        async with open_channel(rendezvous) as channel:
            request = rendezvous_pb.GetRunRequest(run_id="run-1")
            run = (await rendezvous_grpc.RendezvousServiceStub(channel).GetRun(request)).run
        assert (run.phase, run.node_count) == (rendezvous_pb.PHASE_JOINABLE, 0)


async def test_a_second_stop_of_a_daemon_kills_its_workers(tmp_path: Path) -> None:
    """A second signal cancels the wait for the job: slow workers are killed."""
    slow = 'trap "sleep 600" TERM; touch $1/started; while :; do sleep 0.02; done'
    async with embedded_rendezvous() as rendezvous, embedded_timer() as timer:
        async with Daemon(timer, None, {"PATH": os.environ["PATH"]}) as daemon:
            host = Host(tmp_path, rendezvous, None, "worker")  # type: ignore[arg-type]
            await daemon._launch(host.request(slow))
            await until((tmp_path / "started").exists, "the worker")
            leaving = asyncio.create_task(daemon.leave())
            await asyncio.sleep(0.25)  # so that a second request would count as urgent
            with pytest.raises(ServiceError, match="shutting down"):
                await daemon._launch(host.request("exit 0"))
            leaving.cancel()
        result = daemon.jobs.latest_first[0].job.result
        assert result is not None
        assert result.exit_code == 128 + 15


@pytest.mark.parametrize(
    ("more", "field", "told"),
    [
        ({"run_id": ""}, "spec.run_id", "must not be empty"),
        ({"command": []}, "spec.command", "must name a program"),
        ({"local_world_size": -1}, "spec.local_world_size", "must be from 0 to 16384"),
        ({"local_world_size": 20_000}, "spec.local_world_size", "must be from 0 to 16384"),
        ({"min_nodes": 3, "max_nodes": 2}, "spec.max_nodes", "must be at least min_nodes (3)"),
        ({"min_nodes": -1}, "spec.max_nodes", "both from 1 to 100000"),
        ({"rendezvous_settings": {"join": "1"}}, "spec.rendezvous_settings", "'join' is not a setting"),
        ({"rendezvous_settings": {"join_timeout": "soon"}}, "spec.rendezvous_settings", "is not a number"),
        ({"rendezvous_endpoint": "here"}, "spec.rendezvous_endpoint", "has no port"),
        ({"rendezvous_endpoint": ""}, "spec.rendezvous_endpoint", "must not be empty"),
        ({"rendezvous_endpoint": "127.0.0.1:1," * 400}, "spec.rendezvous_endpoint", "at most 4096 bytes"),
        ({"run_id": "a\nb"}, "spec.run_id", "must not have control characters"),
        ({"node_id": "x" * 257}, "spec.node_id", "at most 256 bytes"),
        ({"environment": {"A=B": "1"}}, "spec.environment", "'A=B' or its value is not valid"),
        ({"command": ["a\0b"]}, "spec.command", "must not have NUL characters"),
        ({"max_restarts": -1}, "spec.max_restarts", "must be from 0"),
        ({"options": {"teee": "3"}}, "spec.options", "there is no such option"),
        ({"options": {"tee": "9"}}, "spec.options", "tee 9: '9' names no stream"),
        ({"options": {"role": "x"}}, "spec.options", "'role' has a field of its own, spec.role"),
        ({"options": {"nproc-per-node": "many"}}, "spec.options", "'many' is none of cpu, gpu, xpu, auto"),
        ({"options": {"drain_timeout": "1"}}, "spec.options", "a field of its own, spec.drain_timeout"),
        ({"drain_timeout": {"seconds": -1}}, "spec.drain_timeout", "must be at least 0"),
        ({"stop_signal": "SIGKILL"}, "spec.stop_signal", "can't be caught by a worker"),
        ({"health_checks": ["memory:1MiB", "luck"]}, "spec.health_checks", "luck"),
        ({"log_max_size": 5}, "spec.log_max_size", "is too small for a log file"),
        ({"log_keep_files": -1}, "spec.log_keep_files", "is not a whole number"),
        ({"master_addr": "a\nb"}, "spec.master_addr", "is no name of a host and no address"),
        ({"master_port": 70_000}, "spec.master_port", "is not a port"),
        ({"numa_binding": "moon"}, "spec.numa_binding", "is none of node"),
        ({"launch_id": "x" * 257}, "launch_id", "at most 256 bytes"),
        ({"timer_endpoint": "here"}, "spec.timer_endpoint", "has no port"),
        ({"shutdown_timeout": {"seconds": -1}}, "spec.shutdown_timeout", "must be at least 0"),
        (
            {"local_world_size": 2, "virtual_local_rank": True, "environment": {"CUDA_VISIBLE_DEVICES": "3"}},
            "spec.local_world_size",
            "CUDA_VISIBLE_DEVICES=3 names 1 device for 2 workers",
        ),
    ],
)
async def test_a_job_that_can_not_be_run_is_refused_with_its_field(
    host: Host, more: dict[str, Any], field: str, told: str
) -> None:
    """The job is refused before anything is started."""
    error = await host.refused(**more)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [name for name, _ in error.field_violations] == [field]
    assert told in error.field_violations[0][1]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"log_dir": "/proc/none"}, "cannot make a log directory in /proc/none"),
        (
            {"rendezvous_endpoint": "127.0.0.1:1", "rendezvous_settings": {"read_timeout": "0.2"}},
            "no rendezvous service",
        ),
    ],
)
async def test_a_job_that_turns_out_impossible_ends_with_2(
    host: Host, more: dict[str, Any], told: str
) -> None:
    """The client can read the reason; the daemon goes on."""
    await host.launch("exit 0", **more)
    job = await host.ended()
    assert (job.exit_code, told in job.detail) == (2, True)
    await host.launch("exit 0")
    assert (await host.ended()).exit_code == 0


async def test_a_job_that_could_not_begin_can_be_stopped_as_any_other(host: Host) -> None:
    """It never joined its run, so it can't leave one, however urgent the second request is.

    Found by `make hostile OF=agent SEED=5 ONLY=2042`, among others: UNEXPECTED_ERROR.
    """
    (host.folder / "logs").write_text("no folder")
    await host.launch("exit 0")
    before = await host.ended()
    await host.stub.StopJob(pb.StopJobRequest(run_id="run-1"))
    await asyncio.sleep(0.25)  # requests within 0.2 s count as one
    await host.stub.StopJob(pb.StopJobRequest(run_id="run-1", now=True))
    assert await host.ended() == before


async def test_a_job_can_be_stopped_before_it_has_joined(tmp_path: Path) -> None:
    """Two requests, the second urgent: the job leaves as soon as it can, without a worker."""
    async with (
        embedded_rendezvous() as rendezvous,
        embedded_timer() as timer,
        Daemon(timer, None, {}) as daemon,
    ):
        host = Host(tmp_path, rendezvous, None, "worker")  # type: ignore[arg-type]
        await daemon._launch(host.request("touch $1/started"))
        job = daemon.jobs.running[0]
        job.request_stop("by a test")
        job.request_stop("by a test", at_once=True)
        await asyncio.wait_for(asyncio.gather(*daemon._running), PATIENCE)
        assert job.result is not None
        assert job.result.detail == "left the run: by a test"
        assert not (tmp_path / "started").exists()


async def test_unusable_certificates_are_the_jobs_end_not_the_daemons(tmp_path: Path) -> None:
    """A missing file is reported like any other setting that can't be used."""
    tls = ClientTLS(ca=tmp_path / "none.pem")
    async with embedded_timer() as timer, Daemon(timer, tls, {}) as daemon:
        host = Host(tmp_path, "127.0.0.1:1", None, "worker")  # type: ignore[arg-type]
        await daemon._launch(host.request("exit 0"))
        await asyncio.wait_for(asyncio.gather(*daemon._running), PATIENCE)
        result = daemon.jobs.latest_first[0].job.result
        assert result is not None
        assert result.exit_code == 2
        assert "none.pem" in result.detail


async def test_a_host_that_can_start_no_process_refuses_a_job(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is UNAVAILABLE: another host may be able to."""

    def fail() -> None:
        raise SpawnError("cannot start the spawner process: Resource temporarily unavailable")

    monkeypatch.setattr(Spawner, "start", fail)
    error = await host.refused()
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_PROCESSES")
