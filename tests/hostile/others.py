"""The clients that are not part of an attack: for each service, those that must not notice it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import grpc
import grpc.aio

from hostile.bystander import Bystander
from hostile.kinds import AGENT, MOST_JOBS, MOST_NODES, MOST_RUNS, MOST_TIMERS, RENDEZVOUS, TIMER, Kind
from rallypoint.agent.supervisor.jobs import MOST_ENDED
from rallypoint.agent.v1 import supervisor_service_pb2 as agent_pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as agent_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import Plaintext
from rallypoint.timer.client.client import ExpiredTimer, NodeTimers
from rallypoint.timer.v1 import timer_service_pb2 as timer_pb
from rallypoint.timer.v1 import timer_service_pb2_grpc as timer_grpc
from support.waiting import PATIENCE, until

# No hostile request has the name of this run.
_RUN = "bystander"
# The tokens that the attack gives to nodes it invents, and that end their timers.
_TOKENS = (b"", b"1", b"value")


class Others(Protocol):
    """Clients of the server under attack. All methods raise AssertionError if the server is not as it must be."""

    async def begin(self) -> None:
        """Begin, before the attack."""

    async def check(self) -> None:
        """Check, while the attack pauses, that they are not affected."""

    async def finish(self) -> str:
        """Check the server after the attack, clean up after it, and end; return a summary for people."""


def others_of(kind: Kind, address: str) -> Others:
    """Return the clients that are beside an attack on a service at this address."""
    return _OTHERS[kind.name](address)


class Jobs:
    """Two jobs: one that keeps its round during the attack, and one that begins after it."""

    def __init__(self, address: str) -> None:
        self._bystander, self._newcomer = (Bystander(address, name) for name in (_RUN, "newcomer"))

    async def begin(self) -> None:
        """Form a round."""
        await self._bystander.begin()

    async def check(self) -> None:
        """Check that the round lasts."""
        self._bystander.check()

    async def finish(self) -> str:
        """Form rounds; end the runs of the attack; begin the other job."""
        bystander, slowest = self._bystander, 0.0
        for _ in range(3):
            began = time.monotonic()
            await bystander.stub.RestartRun(pb.RestartRunRequest(run_id=_RUN), timeout=PATIENCE)
            await bystander.formed()
            slowest = max(slowest, time.monotonic() - began)
        runs = await _check_limits(bystander)
        await _clear_up(bystander)
        await self._newcomer.begin()
        await self._newcomer.close()
        await self._newcomer.hang_up()
        await bystander.close()
        await _until_expired(bystander, 0)
        await bystander.hang_up()
        return (
            f"a job beside it kept its round, and formed the next within {slowest * 1000:.0f} ms; "
            f"{runs} runs at the end"
        )


async def _check_limits(bystander: Bystander) -> int:
    """Check that no names made more runs and nodes than allowed, and that no watch is left; return the runs."""
    runs = await _all_runs(bystander)
    assert len(runs) <= MOST_RUNS
    assert max(run.node_count for run in runs) <= MOST_NODES
    for run in runs:
        watching = bystander.stub.WatchRun(pb.WatchRunRequest(run_id=run.run_id), timeout=PATIENCE)
        with suppress(grpc.aio.AioRpcError):
            assert await watching.read() is not grpc.aio.EOF
        assert not watching.done() or await watching.code() in (
            grpc.StatusCode.OK,
            grpc.StatusCode.NOT_FOUND,
        ), run
        watching.cancel()
    return len(runs)


async def _clear_up(bystander: Bystander) -> None:
    """End the runs of the attack as an operator; wait until they expire."""
    for run in await _all_runs(bystander):
        if run.run_id != bystander.run_id:
            with suppress(grpc.aio.AioRpcError):  # it expired meanwhile
                await bystander.stub.CloseRun(pb.CloseRunRequest(run_id=run.run_id), timeout=PATIENCE)
    await _until_expired(bystander, 1)


async def _until_expired(bystander: Bystander, left: int) -> None:
    """Wait until only so many runs are left; those without nodes expire."""
    began = time.monotonic()
    while len(runs := await _all_runs(bystander)) > left:
        assert time.monotonic() - began < PATIENCE, runs
        await asyncio.sleep(0.05)


async def _all_runs(bystander: Bystander) -> list[pb.Run]:
    runs: list[pb.Run] = []
    token = ""
    while True:
        request = pb.ListRunsRequest(page_token=token)
        page = await bystander.stub.ListRuns(request, timeout=PATIENCE)
        runs += page.runs
        token = page.next_page_token
        if not token:
            return runs


class Timers:
    """An agent with a timer that outlives the attack, and must not get a report of a hung worker."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, Plaintext())
        self._stub = timer_grpc.TimerServiceStub(self._channel)
        self._client = NodeTimers(
            self._channel, run_id=_RUN, node_id="a", lease=1, token=b"secret", stall_after=0
        )
        self._troubles: list[str] = []
        self._expired: list[str] = []

    async def begin(self) -> None:
        """Start a timer, and wait until the service counts it down."""
        self._client.on_trouble = self._troubles.append
        self._client.acquire("0@1", "step", 3600.0)
        self._client.progress("0@1", 0, 1, asyncio.get_running_loop().time())
        self._client.start(self._note)
        began = time.monotonic()
        while await self._held() != ["step"]:
            assert time.monotonic() - began < PATIENCE
            await asyncio.sleep(0.05)

    async def check(self) -> None:
        """Check that the timer counts down, on the same stream from the start."""
        assert await self._held() == ["step"]
        assert self._expired == []
        # It was reported once, when the service was found.
        assert self._troubles == [""]
        assert self._client.trouble == ""

    async def finish(self) -> str:
        """Check the limits, end the timers of the attack, and check that a worker that hangs now is reported."""
        timers = await self._timers()
        assert len(timers) <= MOST_TIMERS
        for each in timers:
            for token in _TOKENS if each.run_id != _RUN else ():
                request = timer_pb.ClearTimersRequest(token=token)
                request.run_id, request.node_id, request.worker_id = each.run_id, each.node_id, each.worker_id
                with suppress(grpc.aio.AioRpcError):  # of another agent, with another token
                    await self._stub.ClearTimers(request, timeout=PATIENCE)
        began = time.monotonic()
        self._client.acquire("0@1", "hangs", 0.05)
        await until(lambda: self._expired == ["hangs"], "the expiry of a timer of the bystander")
        found = time.monotonic() - began
        self._client.release("0@1", "hangs")
        self._expired.clear()
        await self.check()
        await self._client.close()
        await self._channel.close()
        return (
            f"an agent beside it kept its timer, and learned of an expiry within {found * 1000:.0f} ms; "
            f"{len(timers)} timers at the end"
        )

    async def _note(self, expired: ExpiredTimer) -> bool:
        self._expired.append(expired.scope)
        return True

    async def _held(self) -> list[str]:
        counting = timer_pb.TIMER_STATE_COUNTING
        return [timer.scope for timer in await self._timers(_RUN) if timer.state == counting]

    async def _timers(self, run_id: str = "") -> list[timer_pb.Timer]:
        timers: list[timer_pb.Timer] = []
        request = timer_pb.ListTimersRequest(run_id=run_id)
        while True:
            page = await self._stub.ListTimers(request, timeout=PATIENCE)
            timers += page.timers
            if not page.next_page_token:
                return timers
            request.page_token = page.next_page_token


class Workers:
    """A small job whose worker outlives the attack."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address, Plaintext())
        self._stub = agent_grpc.SupervisorServiceStub(self._channel)
        self._pid = 0

    async def begin(self) -> None:
        """Launch the job, and wait until its worker runs."""
        await self._launch(_RUN, "/bin/sleep", "3600")
        # The job runs a moment before its worker does.
        job = await self._once(_RUN, lambda job: any(worker.pid for worker in job.workers))
        self._pid = job.workers[0].pid

    async def check(self) -> None:
        """Check that the same process runs."""
        job = await self._job(_RUN)
        assert job.state == agent_pb.JOB_STATE_RUNNING, job
        assert [(each.pid, each.state) for each in job.workers] == [
            (self._pid, agent_pb.WORKER_STATE_RUNNING)
        ]

    async def finish(self) -> str:
        """Check the limit of kept jobs, end those of the attack, and check that one of another client runs well."""
        jobs = (await self._stub.ListJobs(agent_pb.ListJobsRequest(), timeout=PATIENCE)).jobs
        running = [each.run_id for each in jobs if each.state != agent_pb.JOB_STATE_ENDED]
        assert len(jobs) <= MOST_ENDED
        assert len(running) <= MOST_JOBS
        for run_id in running:
            if run_id != _RUN:
                await self._stop(run_id)
        # A second attack on the same server needs another run: this one is closed at its end.
        newcomer = f"newcomer-{self._pid}"
        await self._launch(newcomer, "/bin/true")
        job = await self._once(newcomer, lambda job: job.state == agent_pb.JOB_STATE_ENDED)
        assert job.exit_code == 0, job
        await self.check()
        await self._stop(_RUN)
        await self._channel.close()
        return f"a job beside it kept its worker, pid {self._pid}; {len(jobs)} jobs at the end"

    async def _launch(self, run_id: str, *command: str) -> None:
        spec = agent_pb.JobSpec(run_id=run_id, command=command)
        await self._stub.LaunchJob(agent_pb.LaunchJobRequest(spec=spec), timeout=PATIENCE)

    async def _stop(self, run_id: str) -> None:
        stop = agent_pb.StopJobRequest(run_id=run_id, now=True)
        await self._stub.StopJob(stop, timeout=PATIENCE)
        await self._once(run_id, lambda job: job.state == agent_pb.JOB_STATE_ENDED)

    async def _job(self, run_id: str) -> agent_pb.Job:
        response = await self._stub.GetJob(agent_pb.GetJobRequest(run_id=run_id), timeout=PATIENCE)
        return response.job

    async def _once(self, run_id: str, condition: Callable[[agent_pb.Job], bool]) -> agent_pb.Job:
        began = time.monotonic()
        while not condition(job := await self._job(run_id)):
            assert time.monotonic() - began < PATIENCE, job
            await asyncio.sleep(0.05)
        return job


_OTHERS: dict[str, Callable[[str], Others]] = {RENDEZVOUS.name: Jobs, TIMER.name: Timers, AGENT.name: Workers}
