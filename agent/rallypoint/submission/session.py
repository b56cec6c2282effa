"""One submitted job from its launch to its end, with signals from a terminal that stop it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from rallypoint.agent.job.result import ALREADY_SUCCEEDED, FAILED, PERMANENT, REFUSED, SUCCEEDED, UNFIT
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientSecurity
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.loop import cancel_all, handling_signals
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.submission.following import Followed, RemoteAgent, labels
from rallypoint.submission.launching import launch_everywhere
from rallypoint.submission.output import JobStatusLines, Lines, LineSink, lost_in_words

# ---- The exit code of a job on many hosts, from the exit codes of its hosts.


def exit_code_of(codes: Sequence[int | None], *, succeeded: bool | None = None) -> int:
    """Return the exit code of the job.

    Args:
        codes: Exit codes of its hosts; None: the host was lost.
        succeeded: Outcome of the run at its rendezvous service; None: unknown.
    """
    known = [code for code in codes if code is not None]
    if known and set(known) == {ALREADY_SUCCEEDED}:
        return ALREADY_SUCCEEDED
    if succeeded:
        return SUCCEEDED
    # The end of the run comes before the end of single hosts, which may be unhealthy or drained.
    for code in (PERMANENT, FAILED):
        if code in known:
            return code
    if SUCCEEDED in known and succeeded is None:
        return SUCCEEDED
    for code in (UNFIT, REFUSED):
        if code in known:
            return code
    return next((code for code in known if code != SUCCEEDED), FAILED)


STOP_TIMEOUT = 10.0
"""Seconds in which agents must confirm that the job stops."""

LAST_ROUND_UP = 15.0
"""Seconds for hosts to end the job after its workers are killed; the hosts that exceed it are named."""

_OUTCOME_TIMEOUT = 5.0
# Ctrl-C may arrive twice, from the terminal and from a wrapper that passes it on: signals within this number of
# seconds count as one.
_ONE_REQUEST = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Submission:
    """A job to run, and its hosts.

    Attributes:
        launch: The request for each of them.
        security: How connections to them are secured.
        timeout: Seconds that an agent may be unreachable before it counts as lost.
        detach: Return when the job is launched.
    """

    endpoints: Sequence[str]
    launch: pb.LaunchJobRequest
    security: ClientSecurity
    timeout: float
    detach: bool = False


class SubmissionSession:
    """Run one submission; used once.

    Attributes:
        launches: The agents' replies to the launch; empty before all have accepted the job.
        failure_report: Which failure ended the run, for people; empty: none, or not known yet.
    """

    def __init__(
        self, submission: Submission, outputs: Mapping[int, LineSink], report_line: Callable[[str], None]
    ) -> None:
        """Store the settings.

        Args:
            outputs: Destinations of the workers' output, by stream.
            report_line: Called with each line about the job itself.
        """
        self.launches: Sequence[pb.LaunchJobResponse] = ()
        self.failure_report = ""
        self._submission = submission
        # Sources of output: an agent, and the rank of a worker there.
        self._lines: Lines[tuple[Followed, int]] = Lines(outputs)
        self._report_line = report_line
        self._status_lines = JobStatusLines(submission.launch.spec.max_restarts)
        self._agents: list[RemoteAgent] = []
        self._followed: list[Followed] = []
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()
        self._ignore_signals_until = 0.0
        self._stops: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Launch the job, follow it to its end, and return the exit code.

        Raises:
            NotLaunched: An agent did not accept the job, so no agent runs it.
        """
        async with AsyncExitStack() as stack:
            endpoints = self._submission.endpoints
            for endpoint, label in zip(endpoints, labels(endpoints), strict=True):
                channel = await stack.enter_async_context(open_channel(endpoint, self._submission.security))
                self._agents.append(RemoteAgent(endpoint, label, pb_grpc.SupervisorServiceStub(channel)))
            stack.enter_context(handling_signals(_SIGNALS, self._received))
            launches = await self._launch()
            if launches is None:
                return 128 + self._signals[0]
            self.launches = launches
            run_id = self._submission.launch.spec.run_id
            where = ", ".join(agent.label for agent in self._agents)
            self._report_line(
                f"run {run_id} is launched on {where}; rendezvous at {launches[0].rendezvous_endpoint}"
            )
            if self._submission.detach:
                return 0
            await self._follow()
            return await self._conclude(launches[0].rendezvous_endpoint)

    async def _launch(self) -> list[pb.LaunchJobResponse] | None:
        """Return None if a signal interrupted the launch; the job is then stopped everywhere."""
        submission = self._submission
        launching = asyncio.create_task(
            launch_everywhere(self._agents, submission.launch, submission.security)
        )
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({launching, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not launching.done():
                self._report_line("cancelling the launch")
                launching.cancel()
                await asyncio.wait({launching})
            return None if launching.cancelled() else launching.result()
        finally:
            signalled.cancel()

    async def _follow(self) -> None:
        submission = self._submission
        self._followed = [
            Followed(
                agent,
                submission.launch,
                submission.security,
                timeout=submission.timeout,
                note=self._report_line,
            )
            for agent in self._agents
        ]
        watching = [asyncio.create_task(each.watch(self._changed)) for each in self._followed]
        reading = [asyncio.create_task(self._read_logs(each)) for each in self._followed]
        everything = asyncio.gather(
            *(self._to_the_end(*pair) for pair in zip(watching, reading, strict=True))
        )
        try:
            await self._wait_or_stop(everything)
        finally:
            await cancel_all((everything, *watching, *reading, *self._stops))

    async def _to_the_end(self, watching: asyncio.Task[None], reading: asyncio.Task[None]) -> None:
        await watching
        await reading

    async def _read_logs(self, followed: Followed) -> None:
        try:
            await followed.follow_logs(self._print)
        finally:
            for source in sorted(self._lines.sources, key=lambda source: source[1]):
                if source[0] is followed:
                    await self._lines.finish(source)

    async def _wait_or_stop(self, everything: asyncio.Future[list[None]]) -> None:
        """Return when the job has ended on all hosts, or signals end the wait."""
        handled = 0
        while not everything.done():
            signalled: asyncio.Future[Any] = asyncio.create_task(self._signalled.wait())
            timeout = None if handled < 2 else LAST_ROUND_UP
            waiting: set[asyncio.Future[Any]] = {everything, signalled}
            done, _ = await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            signalled.cancel()
            self._signalled.clear()
            if not done or len(self._signals) > 2:
                left = ", ".join(each.agent.label for each in self._followed if not each.ended)
                self._report_line(f"not waiting any longer; the job has not ended on {left or 'any host'}")
                return
            while handled < len(self._signals):
                handled += 1
                self._stop(self._signals[handled - 1], now=handled > 1)
        everything.result()

    def _stop(self, number: signal.Signals, *, now: bool) -> None:
        if now:
            self._report_line("killing the workers on all hosts")
        else:
            self._report_line(
                f"got {number.name}: stopping the job on all hosts; a second signal kills its workers"
            )
        for followed in self._followed:
            task = asyncio.create_task(self._stop_one(followed, f"{number.name} at rallypoint submit", now))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def _stop_one(self, followed: Followed, reason: str, now: bool) -> None:
        why = await followed.stop(reason, now=now, timeout=STOP_TIMEOUT)
        if why is not None:
            self._report_line(f"{followed.agent.label}: could not be stopped: {why}")

    def _changed(self, followed: Followed) -> None:
        label = followed.agent.label
        if followed.job is not None and followed.lost is None:
            for sentence in self._status_lines.update(label, followed.job):
                self._report_line(sentence)
        if followed.lost is not None:
            for sentence in self._status_lines.lose(label, followed.lost):
                self._report_line(sentence)

    async def _print(self, followed: Followed, piece: pb.StreamLogsResponse) -> None:
        prefix = f"[{followed.agent.label} {piece.rank}]: ".encode()
        source = (followed, piece.rank)
        if piece.lost_bytes:
            self._report_line(f"{followed.agent.label}: {lost_in_words(piece)}")
        await self._lines.add(source, piece.cursor.stream, prefix, piece.data)

    async def _conclude(self, rendezvous: str) -> int:
        jobs = [each.job for each in self._followed if each.job is not None]
        reports = [job.failure_report for job in jobs if job.failure_report and job.exit_code]
        codes = [
            each.job.exit_code if each.job is not None and each.job.state == pb.JOB_STATE_ENDED else None
            for each in self._followed
        ]
        if reports and not self._signals:
            self.failure_report = f"The failure that ended the run:\n{reports[0]}"
        if self._signals:
            return 128 + self._signals[0]
        succeeded = None
        if any(code != 0 for code in codes):
            succeeded = await self._request_outcome(rendezvous)
        return exit_code_of(codes, succeeded=succeeded)

    async def _request_outcome(self, endpoint: str) -> bool | None:
        """Return the run's success at its rendezvous service; None if it is unknown or the run has not ended."""
        request = rendezvous_pb.GetRunRequest(run_id=self._submission.launch.spec.run_id)
        async with ReplicaClient(endpoint, self._submission.security) as client:
            try:
                async with asyncio.timeout(_OUTCOME_TIMEOUT):
                    answer: rendezvous_pb.GetRunResponse = await call_any(
                        client, rendezvous_grpc.RendezvousServiceStub, lambda stub: stub.GetRun(request)
                    )
            except (TimeoutError, ServiceError):
                return None
        run = answer.run
        if not run.HasField("run_end"):
            return None
        return run.run_end.outcome == rendezvous_pb.OUTCOME_SUCCEEDED

    def _received(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._ignore_signals_until:
            self._ignore_signals_until = now + _ONE_REQUEST
            self._signals.append(number)
            self._signalled.set()
