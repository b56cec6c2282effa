"""One submitted job from its launch to its end, with somebody at a terminal who may want it stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rallypoint.agent.job.result import FAILED, PERMANENT, REFUSED, SUCCEEDED, UNFIT
from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as rendezvous_pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as rendezvous_grpc
from rallypoint.rpc.calls import call_any
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import ClientTLS
from rallypoint.rpc.errors import ServiceError
from rallypoint.rpc.replica_client import ReplicaClient
from rallypoint.submission.following import Followed, RemoteAgent, labels
from rallypoint.submission.launching import launch_everywhere
from rallypoint.submission.output import JobStatusLines, Lines, LineSink, lost_in_words

# ---- The exit code of a job that ran on many hosts, made of those of its hosts.


def exit_code_of(codes: Sequence[int | None], *, succeeded: bool | None = None) -> int:
    """The exit code that says how the job ended.

    Args:
        codes: Of its hosts; None: the host was lost.
        succeeded: Whether the run did, as its rendezvous service says; None: nobody knows.
    """
    known = [code for code in codes if code is not None]
    if succeeded:
        return SUCCEEDED
    # What ends a run comes before what becomes of single hosts, as that one is not fit, or was told to leave.
    for grave in (PERMANENT, FAILED):
        if grave in known:
            return grave
    if SUCCEEDED in known and succeeded is None:
        return SUCCEEDED
    for grave in (UNFIT, REFUSED):
        if grave in known:
            return grave
    return next((code for code in known if code != SUCCEEDED), FAILED)


STOP_TIMEOUT = 10.0
"""Seconds in which agents are to be told that the job is to stop."""

LAST_ROUND_UP = 15.0
"""Seconds that hosts get to end the job once its workers are to be killed; past it, who has not is named."""

_OUTCOME_TIMEOUT = 5.0
# Ctrl-C may arrive twice, from the terminal and from a wrapper that passes it on: signals that come within so many
# seconds are one.
_ONE_REQUEST = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True, slots=True)
class Submission:
    """What is to be run, and where.

    Attributes:
        endpoints: The agents.
        launch: What each of them gets.
        tls: Certificates towards them; None: plaintext.
        patience: Seconds that an agent may be away before it counts as lost.
        detach: Return when the job is launched.
    """

    endpoints: Sequence[str]
    launch: pb.LaunchJobRequest
    tls: ClientTLS | None
    timeout: float
    detach: bool = False


class SubmissionSession:
    """Carries a submission out. Lives once.

    Attributes:
        launches: What each agent answered when it took the job on; empty before all have.
    """

    def __init__(
        self, submission: Submission, outputs: Mapping[int, LineSink], say: Callable[[str], None]
    ) -> None:
        """Set up.

        Args:
            submission: What.
            outputs: Where the workers' output goes, by stream.
            say: Takes what is told of the job itself, a line at a time.
        """
        self.launches: Sequence[pb.LaunchJobResponse] = ()
        self._submission = submission
        # By whose output it is: an agent, and the rank of a worker there.
        self._lines: Lines[tuple[Followed, int]] = Lines(outputs)
        self._report_line = say
        self._status_lines = JobStatusLines(submission.launch.spec.max_restarts)
        self._agents: list[RemoteAgent] = []
        self._followed: list[Followed] = []
        self._signals: list[signal.Signals] = []
        self._signalled = asyncio.Event()
        self._deaf_until = 0.0
        self._stops: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Launch the job, follow it to its end; returns the exit code.

        Raises:
            NotLaunched: An agent did not take it on, and now none has it.
        """
        async with AsyncExitStack() as stack:
            endpoints = self._submission.endpoints
            for endpoint, label in zip(endpoints, labels(endpoints), strict=True):
                channel = await stack.enter_async_context(open_channel(endpoint, self._submission.tls))
                self._agents.append(RemoteAgent(endpoint, label, pb_grpc.SupervisorServiceStub(channel)))
            stack.enter_context(self._handling_signals())
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
        """None: it was broken off by a signal, and taken back."""
        submission = self._submission
        launching = asyncio.create_task(launch_everywhere(self._agents, submission.launch, submission.tls))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({launching, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if not launching.done():
                self._report_line("taking the launch back")
                launching.cancel()
                await asyncio.wait({launching})
            return None if launching.cancelled() else launching.result()
        finally:
            signalled.cancel()

    async def _follow(self) -> None:
        submission = self._submission
        self._followed = [
            Followed(
                agent, submission.launch, submission.tls, patience=submission.timeout, note=self._report_line
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
            everything.cancel()
            for task in (*watching, *reading, *self._stops):
                task.cancel()
            await asyncio.gather(*watching, *reading, *self._stops, everything, return_exceptions=True)

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
        """Returns when the job is over everywhere, or somebody wants to wait no longer."""
        handled = 0
        while not everything.done():
            signalled: asyncio.Future[Any] = asyncio.create_task(self._signalled.wait())
            patience = None if handled < 2 else LAST_ROUND_UP
            waiting: set[asyncio.Future[Any]] = {everything, signalled}
            done, _ = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
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
            self._report_line("killing the workers everywhere")
        else:
            self._report_line(
                f"got {number.name}: stopping the job everywhere; once more, and its workers are killed"
            )
        for followed in self._followed:
            task = asyncio.create_task(self._stop_one(followed, f"{number.name} at rallypoint submit", now))
            self._stops.add(task)
            task.add_done_callback(self._stops.discard)

    async def _stop_one(self, followed: Followed, reason: str, now: bool) -> None:
        why = await followed.stop(reason, now=now, timeout=STOP_TIMEOUT)
        if why is not None:
            self._report_line(f"{followed.agent.label}: could not be told to stop: {why}")

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
            self._report_line(f"The failure that ended the run:\n{reports[0]}")
        if self._signals:
            return 128 + self._signals[0]
        succeeded = None
        if any(code != 0 for code in codes):
            succeeded = await self._request_outcome(rendezvous)
        return exit_code_of(codes, succeeded=succeeded)

    async def _request_outcome(self, endpoint: str) -> bool | None:
        """Whether the run succeeded, as its rendezvous service has it; None if that can't be known, or not yet."""
        request = rendezvous_pb.GetRunRequest(run_id=self._submission.launch.spec.run_id)
        async with ReplicaClient(endpoint, self._submission.tls) as board:
            try:
                async with asyncio.timeout(_OUTCOME_TIMEOUT):
                    answer: rendezvous_pb.GetRunResponse = await call_any(
                        board, rendezvous_grpc.RendezvousServiceStub, lambda stub: stub.GetRun(request)
                    )
            except (TimeoutError, ServiceError):
                return None
        run = answer.run
        if not run.HasField("run_end"):
            return None
        return run.run_end.outcome == rendezvous_pb.OUTCOME_SUCCEEDED

    @contextmanager
    def _handling_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        with ExitStack() as stack:
            for number in _SIGNALS:
                if number != signal.SIGHUP or not nohup:
                    loop.add_signal_handler(number, self._received, number)
                    stack.callback(loop.remove_signal_handler, number)
            yield

    def _received(self, number: signal.Signals) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._deaf_until:
            self._deaf_until = now + _ONE_REQUEST
            self._signals.append(number)
            self._signalled.set()
