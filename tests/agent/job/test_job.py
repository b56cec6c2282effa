"""A job runs from joining to its end, in all kinds of trouble, and leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rallypoint.agent.config.job import JobConfig, Peer
from rallypoint.agent.failures.analysis import EarlierFailure
from rallypoint.agent.failures.failure import failure_to_start
from rallypoint.agent.hangs import reaper
from rallypoint.agent.job import job as job_module
from rallypoint.agent.job.job import Job
from rallypoint.agent.job.result import FAILED, REFUSED, SUCCEEDED, UNFIT, JobResult
from rallypoint.agent.logs.streams import LogError, Redirect, Streams
from rallypoint.agent.spawner.client import Spawner
from rallypoint.agent.workers.group import WorkerGroup
from rallypoint.launcher.services import embedded_rendezvous, embedded_timer
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc import channel
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from support.processes import fresh_marker, gone, living
from support.replacing import instead_of
from support.waiting import PATIENCE, until

RUN = "run-1"


class Bench:
    """Services, and jobs that use them."""

    def __init__(self, stack: AsyncExitStack, folder: Path, rendezvous: str, timer: str, marker: str) -> None:
        """Build a bench on services that already run."""
        self.folder, self.rendezvous, self.timer, self.marker = folder, rendezvous, timer, marker
        self._stack = stack

    def job(
        self, script: str, node_id: str = "a", nodes: tuple[int, int] = (1, 1), restarts: int = 0, **more: Any
    ) -> Job:
        """A job of two workers that run a shell script, whose first argument is the test's folder."""
        settings = pb.RunSettings(min_nodes=nodes[0], max_nodes=nodes[1], max_restarts=restarts)
        settings.last_call_timeout.FromMilliseconds(50)
        config = JobConfig(
            **{
                "run_id": RUN,
                "node_id": node_id,
                "address": "127.0.0.1",
                "settings": settings,
                "command": ("sh", "-c", script, self.marker, str(self.folder)),
                "environment": {"PATH": os.environ["PATH"]},
                "rendezvous": Peer(self.rendezvous),
                "timer": Peer(self.timer),
                "local_world_size": 2,
                "redirects": Redirect(Streams.BOTH),
                "log_dir": self.folder / "logs",
                "connect_timeout": PATIENCE,
                **more,
            }
        )
        return Job(config, Spawner.start())

    def start(self, job: Job) -> asyncio.Task[JobResult]:
        """Run a job in the background; it does not outlive the test."""
        running = asyncio.create_task(job.run())

        async def end() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self._stack.push_async_callback(end)
        return running

    async def run(self, job: Job) -> JobResult:
        """Run a job to its end."""
        return await asyncio.wait_for(self.start(job), PATIENCE)

    async def state(self) -> pb.Run:
        """Return the state of the run from the service."""
        async with open_channel(self.rendezvous) as channel:
            request = pb.GetRunRequest(run_id=RUN)
            return (await pb_grpc.RendezvousServiceStub(channel).GetRun(request)).run

    async def has(self, name: str) -> None:
        """Wait until a worker has made a file."""
        await until((self.folder / name).exists, name)

    def read(self, name: str) -> str:
        """Return the content of a file that a worker wrote."""
        return (self.folder / name).read_text()


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """Services inside this process; at the end no worker of any job is left."""
    with fresh_marker() as marker:
        async with AsyncExitStack() as services:
            rendezvous = await services.enter_async_context(embedded_rendezvous())
            timer = await services.enter_async_context(embedded_timer())
            async with AsyncExitStack() as stack:
                yield Bench(stack, tmp_path, rendezvous, timer, marker)
        assert gone(marker)


async def test_a_job_whose_workers_succeed_ends_with_0(bench: Bench) -> None:
    """On the only host, that is the run's end too."""
    job = bench.job("exit 0")
    assert await bench.run(job) == JobResult(SUCCEEDED, "all 2 workers of round 1 succeeded")
    assert (await bench.state()).run_end.outcome == pb.OUTCOME_SUCCEEDED
    assert job.log_dir is not None
    assert sorted(path.name for path in (job.log_dir / "attempt_0" / "1").iterdir()) == [
        "stderr.log",
        "stdout.log",
    ]


async def test_a_job_whose_worker_fails_ends_with_1_and_the_failure(bench: Bench) -> None:
    """Without restarts the job ends at once, and the other worker is killed."""
    result = await bench.run(bench.job('[ $RANK = 1 ] && { echo "no data" >&2; exit 3; }; sleep 600'))
    assert result.exit_code == FAILED
    assert result.failure is not None
    assert (result.failure.rank, result.failure.exit_code, result.failure.traceback) == (1, 3, "no data")
    assert result.detail == "worker of rank 1 on node a failed: exited with code 3; no restarts were allowed"


async def test_a_failure_restarts_all_workers_in_the_next_round(bench: Bench) -> None:
    """Both workers get the restart count of the run; both attempts keep their logs."""
    script = """
        echo "$RALLYPOINT_ROUND $TORCHELASTIC_RESTART_COUNT" >> $1/seen.$RANK
        [ $RALLYPOINT_ROUND = 2 ] && exit 0
        [ $RANK = 0 ] && sleep 600
        while [ ! -s $1/seen.0 ]; do sleep 0.01; done
        exit 1
    """
    job = bench.job(script, restarts=1)
    assert (await bench.run(job)).exit_code == SUCCEEDED
    assert [bench.read(f"seen.{rank}") for rank in (0, 1)] == ["1 0\n2 1\n"] * 2
    assert job.log_dir is not None
    assert sorted(path.name for path in job.log_dir.iterdir()) == ["attempt_0", "attempt_1"]


async def test_a_failure_on_one_host_is_reported_on_all(bench: Bench) -> None:
    """An agent whose own workers did not fail reports it too."""
    script = "[ $RANK = 3 ] && exit 9; sleep 600"
    jobs = [bench.job(script, node_id, nodes=(2, 2)) for node_id in ("a", "b")]
    results = await asyncio.gather(*(bench.run(job) for job in jobs))
    assert results[0] == results[1]
    assert results[0].failure is not None
    assert (results[0].exit_code, results[0].failure.rank, results[0].failure.exit_code) == (FAILED, 3, 9)


async def test_a_job_that_is_asked_to_stop_leaves_and_the_run_goes_on(bench: Bench) -> None:
    """Its workers get SIGTERM; the run is not closed."""
    job = bench.job(
        'trap "echo TERM > $1/got.$RANK; exit" TERM; touch $1/started.$RANK; while :; do sleep 0.02; done'
    )
    running = bench.start(job)
    await bench.has("started.0")
    await bench.has("started.1")
    job.request_stop("got SIGTERM")
    assert await running == JobResult(128 + signal.SIGTERM, "left the run: got SIGTERM")
    assert [bench.read(f"got.{rank}") for rank in (0, 1)] == ["TERM\n"] * 2
    run = await bench.state()
    assert (run.phase, run.node_count) == (pb.PHASE_JOINABLE, 0)


async def test_ctrl_c_reaches_the_workers_as_sigint(bench: Bench) -> None:
    """Python programs turn it into KeyboardInterrupt; programs that ignore it are killed after the timeout."""
    ignoring = 'trap "touch $1/got.$RANK" INT; touch $1/started.$RANK; while :; do sleep 0.02; done'
    job = bench.job(ignoring, shutdown_timeout=3.0)
    running = bench.start(job)
    await bench.has("started.1")
    job.request_stop("got SIGINT", signal.SIGINT)
    assert (await running).exit_code == 128 + signal.SIGINT
    await bench.has("got.1")


async def test_asked_twice_a_job_stops_at_once(bench: Bench) -> None:
    """It does not wait for the shutdown timeout; it still returns its lease, so the others re-form at once."""
    script = 'trap "touch $1/got.$RANK" TERM; touch $1/started.$RANK; while :; do sleep 0.02; done'
    job = bench.job(script, shutdown_timeout=4 * PATIENCE)
    running = bench.start(job)
    await bench.has("started.1")
    job.request_stop("got SIGTERM")
    await bench.has("got.1")
    await asyncio.sleep(job_module._ONE_REQUEST)
    job.request_stop("got SIGTERM")
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == 128 + signal.SIGTERM
    assert (await bench.state()).node_count == 0


async def test_asked_twice_a_job_waits_for_no_service_that_is_away(bench: Bench) -> None:
    """It waits neither for the close timeout, nor for the shutdown timeout of its workers."""
    async with AsyncExitStack() as service:
        rendezvous = await service.enter_async_context(embedded_rendezvous())
        script = "trap : TERM; touch $1/started.$RANK; while :; do sleep 0.02; done"
        job = bench.job(
            script, rendezvous=Peer(rendezvous), close_timeout=4 * PATIENCE, shutdown_timeout=4 * PATIENCE
        )
        running = bench.start(job)
        await bench.has("started.1")
    job.request_stop("got SIGTERM")
    await asyncio.sleep(job_module._ONE_REQUEST)
    job.request_stop("got SIGTERM")
    result = await asyncio.wait_for(running, PATIENCE)
    assert result == JobResult(128 + signal.SIGTERM, "left the run: got SIGTERM")


async def test_a_job_that_never_got_in_stops_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no lease to return, and no connection."""
    # gRPC itself keeps the connection attempt for longer than the test lasts.
    arguments = {**dict(channel.CLIENT_ARGUMENTS), "grpc.min_reconnect_backoff_ms": 600_000}
    monkeypatch.setattr(channel, "CLIENT_ARGUMENTS", tuple(arguments.items()))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"127.0.0.1:{mute.getsockname()[1]}"
        job = bench.job(
            "exit 0", rendezvous=Peer(endpoint), connect_timeout=4 * PATIENCE, close_timeout=4 * PATIENCE
        )
        running = bench.start(job)
        await until(lambda: hasattr(job, "_membership"), "the job to begin")
        job.request_stop("got SIGINT", signal.SIGINT)
        assert (await asyncio.wait_for(running, PATIENCE)).exit_code == 128 + signal.SIGINT


async def test_an_unavailable_service_delays_a_job_only_briefly(bench: Bench) -> None:
    """The lease can't be returned, so it expires; the job ends after the close timeout."""
    async with AsyncExitStack() as service:
        rendezvous = await service.enter_async_context(embedded_rendezvous())
        job = bench.job("touch $1/started.$RANK; sleep 600", rendezvous=Peer(rendezvous), close_timeout=0.2)
        running = bench.start(job)
        await bench.has("started.1")
    assert living(bench.marker), "workers run on while the service is away"
    job.request_stop("got SIGTERM")
    result = await asyncio.wait_for(running, PATIENCE)
    assert result == JobResult(128 + signal.SIGTERM, "left the run: got SIGTERM")


async def test_a_job_that_can_not_join_ends_with_2(bench: Bench) -> None:
    """The service is missing, or the run has other settings: the job could not start, and the line has the reason."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{nobody.getsockname()[1]}"
        result = await bench.run(bench.job("exit 0", rendezvous=Peer(endpoint), connect_timeout=0.5))
    assert result.exit_code == REFUSED
    assert result.detail.startswith(f"no rendezvous service answered at {endpoint} within 0.5 s: ")
    first = bench.job("sleep 600", nodes=(2, 2))
    bench.start(first)
    await until(lambda: hasattr(first, "_membership") and bool(first._membership.lease), "the first to be in")
    result = await bench.run(bench.job("exit 0", "b", nodes=(3, 3)))
    assert result.exit_code == REFUSED
    assert result.detail.startswith(
        f"{bench.rendezvous} refused this node: run 'run-1' has other settings: min_nodes"
    )


async def test_a_job_whose_name_was_taken_over_ends_with_1(bench: Bench) -> None:
    """Its command line was correct, as it did start; its workers must not run beside the other job's."""
    first = bench.job("touch $1/started.$RANK; sleep 600")
    running = bench.start(first)
    await bench.has("started.1")
    bench.start(bench.job("sleep 600"))
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == FAILED
    # gRPC may end the stream without the reason; then the refusal to resume has another text.
    assert re.search(r"an agent joined again under its name|lease \d+ superseded it", result.detail)


async def test_a_job_that_is_done_waits_no_longer_than_the_exit_barrier(bench: Bench) -> None:
    """It ends with 0, and its departure does not restart the workers of the other host."""
    settings = pb.RunSettings(min_nodes=2, max_nodes=2)
    settings.exit_barrier_timeout.FromMilliseconds(200)
    done = bench.start(bench.job("exit 0", "a", settings=settings))
    at_work = bench.start(bench.job('while [ ! -e "$1/go" ]; do sleep 0.01; done', "b", settings=settings))
    result = await asyncio.wait_for(done, PATIENCE)
    assert result == JobResult(
        SUCCEEDED, "the workers here succeeded; workers of other hosts did not finish within the exit barrier"
    )
    assert not at_work.done()
    (bench.folder / "go").touch()
    assert await asyncio.wait_for(at_work, PATIENCE) == JobResult(
        SUCCEEDED, "all 4 workers of round 1 succeeded"
    )


async def test_a_node_that_is_taken_out_stops_its_workers_and_ends_with_1(bench: Bench) -> None:
    """The operator's reason is in the detail; the node can't join again until it is readmitted."""
    running = bench.start(bench.job('touch "$1/up"; sleep 600'))
    await bench.has("up")
    request = pb.EvictNodeRequest(run_id=RUN, node_id="a", reason="bad memory")
    async with open_channel(bench.rendezvous) as channel:
        stub = pb_grpc.RendezvousServiceStub(channel)
        assert (await stub.EvictNode(request)).was_in
        result = await asyncio.wait_for(running, PATIENCE)
        assert result.exit_code == FAILED
        assert "node 'a' was taken out of run 'run-1' by an operator (bad memory)" in result.detail
        assert gone(bench.marker)
        assert (await bench.run(bench.job("exit 0"))).exit_code == REFUSED
        assert (await stub.ReadmitNode(pb.ReadmitNodeRequest(run_id=RUN, node_id="a"))).was_evicted
    assert (await bench.run(bench.job("exit 0"))).exit_code == SUCCEEDED


async def test_a_closed_run_ends_the_job_with_1(bench: Bench) -> None:
    """An operator ended it, for all its hosts."""
    job = bench.job("touch $1/started.$RANK; sleep 600")
    running = bench.start(job)
    await bench.has("started.1")
    async with open_channel(bench.rendezvous) as channel:
        await pb_grpc.RendezvousServiceStub(channel).CloseRun(pb.CloseRunRequest(run_id=RUN, reason="enough"))
    assert await running == JobResult(FAILED, "closed by an operator: enough")


async def test_a_spawner_that_dies_costs_a_restart_and_no_more(bench: Bench) -> None:
    """Its workers die with it; the next round has a new spawner."""
    script = "touch $1/started.$RALLYPOINT_ROUND.$RANK; [ $RALLYPOINT_ROUND = 2 ] || sleep 600"
    job = bench.job(script, restarts=1)
    running = bench.start(job)
    await bench.has("started.1.1")
    assert job._groups.spawner.pid is not None
    os.kill(job._groups.spawner.pid, signal.SIGKILL)
    assert (await running).exit_code == SUCCEEDED
    await bench.has("started.2.1")


async def test_leftover_processes_are_gone_before_success_is_reported(bench: Bench) -> None:
    """A daemon that outlives its worker would keep its port, its memory or its files in the next round."""
    with fresh_marker() as left_behind:
        leaves = f"""
            setsid sh -c 'touch $0; sleep 600' $1/daemon.$RANK {left_behind} &
            while [ ! -e $1/daemon.$RANK ]; do sleep 0.01; done
        """
        waits = "while [ ! -e $1/go ]; do sleep 0.02; done"
        jobs = [bench.job(leaves, "a", nodes=(2, 2)), bench.job(waits, "b", nodes=(2, 2))]
        running = [bench.start(job) for job in jobs]
        await bench.has("daemon.0")
        await bench.has("daemon.1")
        await until(lambda: bool(jobs[0].state.succeeded), "the first host's success")
        assert gone(left_behind)
        (bench.folder / "go").touch()
        assert [(await job).exit_code for job in running] == [SUCCEEDED, SUCCEEDED]


@pytest.mark.parametrize("as_it_ends", [False, True])
async def test_an_unexpected_error_ends_the_job(bench: Bench, as_it_ends: bool) -> None:
    """A job that hangs is the worst failure, because nothing reports it. No worker is left either."""
    job = bench.job("touch $1/started.$RANK; sleep 600")
    running = bench.start(job)
    await bench.has("started.1")

    async def fail() -> None:
        try:
            await asyncio.sleep(3600 if as_it_ends else 0)
        finally:
            raise ZeroDivisionError("what nobody thought of")

    if as_it_ends:
        job.request_stop("got SIGTERM")
    job._background.begin(fail())
    result = await asyncio.wait_for(running, PATIENCE)
    assert result.exit_code == FAILED
    assert "internal error: ZeroDivisionError('what nobody thought of')" in result.detail


@pytest.mark.parametrize("delayed", [False, True])
async def test_an_exit_that_cannot_be_taken_ends_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, delayed: bool
) -> None:
    """The spawner's client only logs errors of its callback; the job would wait for its workers for ever."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError("what nobody thought of")

    monkeypatch.setattr("rallypoint.agent.workers.group.PostMortem.describe", fail)
    monkeypatch.setattr("rallypoint.agent.logs.output.WorkerOutput.delayed", delayed)
    result = await bench.run(bench.job("exit 7"))
    assert result.exit_code == FAILED
    assert "internal error: ZeroDivisionError('what nobody thought of')" in result.detail


async def test_the_start_of_a_round_is_in_the_events_of_its_run(bench: Bench) -> None:
    """It has the duration of each part on this host: after a restart all parts, at first only the start."""
    # Workers that end at once may do so before their start is reported: the second ones wait for that report.
    script = "test -e $1/again || { touch $1/again; exit 7; }; until test -e $1/reported; do sleep 0.05; done"
    job = bench.start(bench.job(script, restarts=3))
    request = pb.ListEventsRequest(run_id=RUN)
    request.filter.kinds.append(pb.EVENT_KIND_ROUND_STARTED)
    again: list[pb.Event] = []
    async with open_channel(bench.rendezvous) as channel, asyncio.timeout(PATIENCE):
        await until((bench.folder / "again").exists, "the first workers")
        while not again:
            events = (await pb_grpc.RendezvousServiceStub(channel).ListEvents(request)).events
            again = [event for event in events if event.round_start.HasField("duration")]
            await asyncio.sleep(0.05)
    (bench.folder / "reported").touch()
    assert (await job).exit_code == SUCCEEDED
    assert all(event.round_start.slowest_node_id == "a" for event in events)
    assert all(event.round_start.parts.started.ToNanoseconds() for event in events)
    assert all(event.round_start.parts.detected.ToNanoseconds() for event in again)


@pytest.mark.parametrize("method", ["run", "_one_stream"])
async def test_a_membership_that_breaks_ends_the_job_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The result has the error, and is not a refusal without a reason."""

    async def fail(*_: object) -> None:
        raise ZeroDivisionError("what nobody thought of")

    monkeypatch.setattr(f"rallypoint.agent.job.rendezvous.Membership.{method}", fail)
    result = await bench.run(bench.job("sleep 600"))
    assert (result.exit_code, "ZeroDivisionError" in result.detail) == (FAILED, True)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"log_dir": Path("/proc/none")}, LogError),
        ({"rendezvous": Peer("127.0.0.1:1", ClientTLS(ca=Path("/none.pem")))}, SettingError),
    ],
)
async def test_a_failed_setup_leaves_no_spawner_behind(
    bench: Bench, more: dict[str, Any], error: type[Exception]
) -> None:
    """A daemon lives on after a job that could not be started."""
    job = bench.job("exit 0", **more)
    with pytest.raises(error):
        await bench.run(job)
    assert job._groups.spawner.dead


async def test_one_request_that_arrives_twice_is_one(bench: Bench) -> None:
    """Ctrl-C arrives from the terminal and from a wrapper process: workers still get the shutdown timeout."""
    script = 'trap "sleep 0.1; touch $1/saved.$RANK; exit" INT; touch $1/started.$RANK; while :; do sleep 0.02; done'
    job = bench.job(script)
    running = bench.start(job)
    await bench.has("started.0")
    await bench.has("started.1")
    job.request_stop("got SIGINT", signal.SIGINT)
    assert job.stopping
    job.request_stop("got SIGTERM", signal.SIGTERM)
    assert await running == JobResult(128 + signal.SIGINT, "left the run: got SIGINT")
    assert sorted(path.name for path in bench.folder.glob("saved.*")) == ["saved.0", "saved.1"]


# ---- a host on which a process outlives SIGKILL


@pytest.fixture
def survivor(monkeypatch: pytest.MonkeyPatch) -> int:
    """A process that every stop reports as alive: no test can make one that really outlives SIGKILL."""

    @instead_of(monkeypatch, WorkerGroup, "stop")
    async def stop_in_vain(stop: Any, group: WorkerGroup, number: int, timeout: float) -> Any:
        return replace(await stop(group, number, timeout), left=(os.getpid(),))

    monkeypatch.setattr(reaper, "SLOW_DEATH", 0.05)
    monkeypatch.setattr(reaper, "LOOK_TIMEOUT", PATIENCE)
    return os.getpid()


async def test_a_process_that_outlives_a_stop_makes_the_host_unhealthy(bench: Bench, survivor: int) -> None:
    """It takes no part in the next round, although restarts are left, and its exit code is `UNFIT`."""
    job = bench.job('[ $RANK = 1 ] && { echo "no data" >&2; exit 3; }; sleep 600', restarts=5)
    result = await bench.run(job)
    assert result.exit_code == UNFIT == 3
    assert result.detail.startswith(
        f"this host is not fit to run workers: process of workers outlived SIGKILL: {survivor} ("
    )
    assert result.failure is not None
    assert (result.failure.rank, result.failure.traceback) == (1, "no data")
    assert job.state.confirmed == 1
    run = await bench.state()
    assert (len(run.nodes), run.HasField("run_end")) == (0, False)


async def test_a_failed_run_does_not_hide_an_unhealthy_host(bench: Bench, survivor: int) -> None:
    """The caller must know before it starts the next job there; the failure that ended the run is still reported."""
    result = await bench.run(bench.job("exit 3"))
    assert result.exit_code == UNFIT
    assert result.failure is not None


async def test_success_stays_success_with_processes_left_behind(bench: Bench, survivor: int) -> None:
    """All workers of the run have succeeded."""
    job = bench.job("exit 0")
    result = await bench.run(job)
    assert (result.exit_code, result.detail) == (SUCCEEDED, "all 2 workers of round 1 succeeded")
    assert f"outlived SIGKILL: {survivor}" in (job.state.unhealthy or "")


async def test_without_a_place_for_temporary_files_nothing_is_joined(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is one line with a remedy."""

    @instead_of(monkeypatch, tempfile, "TemporaryDirectory")
    def refuse(make: Any, prefix: str, **more: Any) -> Any:
        if prefix == "rallypoint_stacks_":
            raise OSError(28, "No space left on device")
        return make(prefix=prefix, **more)

    with pytest.raises(
        SettingError, match=r"can't make a temporary folder: .*No space left.*; set TMPDIR to another"
    ):
        await bench.run(bench.job("exit 0"))


@pytest.mark.parametrize(("going", "told"), [("stays", [1]), ("is drained", []), ("was asked to stop", [])])
async def test_a_failure_found_during_a_stop_is_not_reported_by_a_leaving_host(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, going: str, told: list[int]
) -> None:
    """A worker had raised before: a host that stays must report it, one that leaves stops its workers in any case."""
    job = bench.job("touch $1/up.$RANK; sleep 600")
    bench.start(job)
    await bench.has("up.1")
    reported: list[int] = []
    monkeypatch.setattr(job._membership, "report_failure", lambda _, round_: reported.append(round_))
    if going == "is drained":
        job.drain(60.0, "maintenance")
    elif going == "was asked to stop":
        job.request_stop("got SIGTERM")
    failure = failure_to_start("no such layer", local_rank=0, rank=0, role="", host="")
    job._events.put_nowait(EarlierFailure(failure))
    await until(job._events.empty, "the end of its handling")
    assert reported == told


async def test_of_ends_that_arrive_at_once_only_the_earliest_is_reported(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A consequence of it could end the run, if its failure is permanent."""
    job = bench.job("touch $1/up.$RANK; sleep 600")
    bench.start(job)
    await bench.has("up.1")
    reported: list[int] = []
    monkeypatch.setattr(job._membership, "report_failure", lambda each, _: reported.append(each.rank))
    assert job.group is not None
    for rank, at in ((1, 5.0), (0, 4.0)):
        failure = failure_to_start("no such layer", local_rank=rank, rank=rank, role="", host="")
        job.group._post_mortem.note(replace(failure, at=at), {})
    await until(lambda: len(reported) == 2, "the reports")
    assert reported == [0, 0]
