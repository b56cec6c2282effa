"""An agent that stands on its own runs one job at a time, refuses what can't be run, and takes its job along."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from process_probe import PATIENCE, fresh_marker, gone, until
from rallypoint.agent.daemon import Daemon
from rallypoint.agent.processes import Spawner
from rallypoint.agent.spawn_protocol import SpawnError
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.cli.roles import embedded_rendezvous, embedded_timer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.serving.channel import open_channel
from rallypoint.serving.errors import ServiceError, decode
from rallypoint.serving.server import Server
from rallypoint.serving.settings import ClientTLS, ServerOptions


class Host:
    """A daemon that serves, and the services its jobs need."""

    def __init__(
        self, folder: Path, rendezvous: str, stub: pb_grpc.SupervisorServiceAsyncStub, marker: str
    ) -> None:
        """All of it stands already."""
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
        """Have a job run; returns the name of its node."""
        return (await self.stub.LaunchJob(pb.LaunchJobRequest(spec=self.spec(script, **more)))).node_id

    async def refused(self, **more: Any) -> ServiceError:
        """The error with which a job is refused."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.launch("exit 0", **more)
        return decode(caught.value)

    async def job(self) -> pb.Job:
        """The job, as the daemon tells of it."""
        return (await self.stub.GetJob(pb.GetJobRequest())).job

    async def ended(self) -> pb.Job:
        """Wait for the job's end."""
        async with asyncio.timeout(PATIENCE):
            while (job := await self.job()).state != pb.JOB_STATE_ENDED:  # noqa: ASYNC110 (no event tells of it)
                await asyncio.sleep(0.01)
        return job


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    """A daemon inside this process; no worker outlives it."""
    with fresh_marker() as marker:
        async with AsyncExitStack() as stack:
            rendezvous = await stack.enter_async_context(embedded_rendezvous())
            timer = await stack.enter_async_context(embedded_timer())
            environment = {"PATH": os.environ["PATH"], "FROM": "the daemon"}
            daemon = await stack.enter_async_context(Daemon(timer, None, environment))
            server = Server(ServerOptions(), services=[daemon.registration])
            await server.start()
            stack.push_async_callback(server.stop)
            channel = await stack.enter_async_context(open_channel(server.address))
            yield Host(tmp_path, rendezvous, pb_grpc.SupervisorServiceStub(channel), marker)
        assert gone(marker)


async def test_a_job_is_run_as_it_was_specified(host: Host) -> None:
    """Where, how many, as whom, with what environment; and how it ended is told."""
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


async def test_one_job_after_another_but_not_beside_it(host: Host) -> None:
    """A second one is refused by the name of the first; after its end there is room."""
    await host.launch("touch $1/started; sleep 60")
    await until((host.folder / "started").exists, "the worker")
    error = await host.refused(run_id="run-2")
    assert (error.code, error.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "JOB_RUNNING")
    assert error.metadata == {"run_id": "run-1"}
    await host.stub.StopJob(pb.StopJobRequest(reason="make room"))
    assert (await host.ended()).detail == "left the run: stopped through SupervisorService: make room"
    await host.launch("exit 0", run_id="run-2")
    job = await host.ended()
    assert (job.run_id, job.exit_code) == ("run-2", 0)


async def test_a_daemon_that_ends_takes_its_job_along_in_good_order(tmp_path: Path) -> None:
    """Its workers get the time to save what they have, also if the job was being stopped already."""
    save = 'trap "sleep 0.3; touch $1/saved; exit" TERM; touch $1/started; while :; do sleep 0.02; done'
    async with embedded_rendezvous() as rendezvous, embedded_timer() as timer:
        async with Daemon(timer, None, {"PATH": os.environ["PATH"]}) as daemon:
            host = Host(tmp_path, rendezvous, None, "worker")  # type: ignore[arg-type]
            daemon._launch(host.spec(save))
            await until((tmp_path / "started").exists, "the worker")
            assert daemon._job is not None
            daemon._job.request_stop("maintenance")
            await asyncio.sleep(0.25)  # long enough for a second request to count as one in a hurry
        assert (tmp_path / "saved").exists()
        async with open_channel(rendezvous) as channel:
            request = rendezvous_pb.GetRunRequest(run_id="run-1")
            run = (await rendezvous_grpc.RendezvousServiceStub(channel).GetRun(request)).run
        assert (run.phase, run.node_count) == (rendezvous_pb.PHASE_JOINABLE, 0)


async def test_who_hurries_a_daemon_has_its_workers_killed(tmp_path: Path) -> None:
    """A second signal cancels the wait for the job: nobody waits for workers that take their time."""
    slow = 'trap "sleep 60" TERM; touch $1/started; while :; do sleep 0.02; done'
    async with embedded_rendezvous() as rendezvous, embedded_timer() as timer:
        async with Daemon(timer, None, {"PATH": os.environ["PATH"]}) as daemon:
            host = Host(tmp_path, rendezvous, None, "worker")  # type: ignore[arg-type]
            daemon._launch(host.spec(slow))
            await until((tmp_path / "started").exists, "the worker")
            leaving = asyncio.create_task(daemon.leave())
            await asyncio.sleep(0.25)  # long enough for a second request to count as one in a hurry
            with pytest.raises(ServiceError, match="going away"):
                daemon._launch(host.spec("exit 0"))
            leaving.cancel()
        assert daemon._job is not None
        assert daemon._job.result is not None
        assert daemon._job.result.exit_code == 128 + 15


@pytest.mark.parametrize(
    ("more", "field", "told"),
    [
        ({"run_id": ""}, "spec.run_id", "must not be empty"),
        ({"command": []}, "spec.command", "must name a program"),
        ({"local_world_size": -1}, "spec.local_world_size", "must be from 1 to 16384"),
        ({"local_world_size": 20_000}, "spec.local_world_size", "must be from 1 to 16384"),
        ({"min_nodes": 3, "max_nodes": 2}, "spec.max_nodes", "must be at least min_nodes (3)"),
        ({"min_nodes": -1}, "spec.max_nodes", "at least 1"),
        ({"rendezvous_settings": {"join": "1"}}, "spec.rendezvous_settings", "'join' is no setting"),
        ({"rendezvous_endpoint": ""}, "spec.rendezvous_endpoint", "has no port"),
        ({"timer_endpoint": "here"}, "spec.timer_endpoint", "has no port"),
        ({"shutdown_timeout": {"seconds": -1}}, "spec.shutdown_timeout", "must not be negative"),
    ],
)
async def test_a_job_that_can_not_be_run_is_refused_by_the_field(
    host: Host, more: dict[str, Any], field: str, told: str
) -> None:
    """Before anything is started."""
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
    """Whoever launched it reads why; the daemon goes on."""
    await host.launch("exit 0", **more)
    job = await host.ended()
    assert (job.exit_code, told in job.detail) == (2, True)
    await host.launch("exit 0")
    assert (await host.ended()).exit_code == 0


async def test_unusable_certificates_are_the_jobs_end_not_the_daemons(tmp_path: Path) -> None:
    """A file that is missing is told like anything else that can't be honoured."""
    tls = ClientTLS(ca=tmp_path / "none.pem")
    async with embedded_timer() as timer, Daemon(timer, tls, {}) as daemon:
        daemon._launch(Host(tmp_path, "127.0.0.1:1", None, "worker").spec("exit 0"))  # type: ignore[arg-type]
        assert daemon._running is not None
        await asyncio.wait_for(daemon._running, PATIENCE)
        assert daemon._job is not None
        assert daemon._job.result is not None
        assert daemon._job.result.exit_code == 2
        assert "none.pem" in daemon._job.result.detail


async def test_a_host_that_can_start_no_process_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Perhaps another one can."""

    def fail() -> None:
        raise SpawnError("cannot start the spawner process: Resource temporarily unavailable")

    monkeypatch.setattr(Spawner, "start", fail)
    error = await host.refused()
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_PROCESSES")
