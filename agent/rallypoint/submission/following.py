"""Follow a job on one agent: its states and logs, across broken connections, until it has ended or is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.endpoint import ClientSecurity, parse_endpoint
from rallypoint.rpc.errors import GONE, ServiceError, decode, tls_advice
from rallypoint.rpc.pace import Pace

# ---- An agent on another host: its names, and calls to it over an unreliable network.


@dataclass(frozen=True, slots=True, eq=False)
class RemoteAgent:
    """An agent of a job.

    Attributes:
        label: Its name before lines of output.
    """

    endpoint: str
    label: str
    stub: pb_grpc.SupervisorServiceAsyncStub


def labels(endpoints: Sequence[str]) -> list[str]:
    """Return short names of agents: their hosts, or the whole endpoints of agents on one host."""
    here = socket.gethostname()  # the host of a Unix socket
    hosts = [parse_endpoint(endpoint).host or here for endpoint in endpoints]
    return [
        host if hosts.count(host) == 1 else endpoint for host, endpoint in zip(hosts, endpoints, strict=True)
    ]


def is_lost(error: ServiceError) -> bool:
    """Return True if a call failed because of the connection or a busy agent, so that a retry may succeed."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after is not None
    if error.reason in ("UNEXPECTED_ERROR", "SUBSCRIBER_TOO_SLOW", "LOGS_UNREADABLE"):
        return True
    # An agent that refuses, or that drains, sends a reason of its own.
    return error.reason == error.code.name and error.code in (*GONE, grpc.StatusCode.DEADLINE_EXCEEDED)


def in_words(error: ServiceError, security: ClientSecurity, *, answered: bool = False) -> str:
    """Describe why a call to an agent failed.

    Args:
        security: How connections to the agent are secured.
        answered: True if the agent has replied before: then the certificates are right.
    """
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return f"no agent answers there ({error.message})"
    if error.reason != error.code.name:
        return f"{error.message} ({error.reason})"
    advice = tls_advice(error.message, security) if not answered else None
    return error.message + (f"; {advice}" if advice else "")


FIRST_ANSWER = 10.0
"""Seconds within which a stream must bring its first message; else it counts as broken."""

LAST_WORDS = 3.0
"""Seconds to retry an agent that is gone after the end of its job, for the rest of the output."""


class Lost(Exception):
    """The agent can't be followed any more; one line with the reason."""


class Retries:
    """Back-off and time limit of the retries while an agent is unreachable."""

    def __init__(self, timeout: Callable[[], float], pace: Pace) -> None:
        """`timeout`: returns the seconds that the agent may now be unreachable before it counts as lost."""
        self._timeout = timeout
        self._pace = pace
        self._since: float | None = None
        self._backoff = pace.backoff()

    @property
    def away(self) -> bool:
        """True if the last attempt failed."""
        return self._since is not None

    def answered(self) -> None:
        """Record a reply: the next failure starts a new time limit."""
        self._since = None
        self._backoff.reset()

    async def failed(self, why: str) -> None:
        """Record a failure, and return when it is time for the next attempt.

        Raises:
            Lost: The agent has been unreachable for too long.
        """
        now = self._pace.clock()
        if self._since is None:
            self._since = now
        if (waited := now - self._since) >= self._timeout():
            raise Lost(f"it has not answered for {waited:.0f} s: {why}" if waited >= 1.0 else why)
        await self._pace.sleep(self._backoff.next())


class LogPieces:
    """The pieces of a log stream; after a broken connection the stream resumes at the last received piece.

    Attributes:
        begun: True if the agent has replied.
    """

    def __init__(
        self,
        stub: pb_grpc.SupervisorServiceAsyncStub,
        request: pb.StreamLogsRequest,
        security: ClientSecurity,
        timeout: Callable[[], float],
        pace: Pace | None = None,
    ) -> None:
        """Store the settings.

        Args:
            request: The logs to read.
            security: How connections to the agent are secured, for advice in errors.
            timeout: Returns the seconds that the agent may now be unreachable.
        """
        self.begun = False
        self._stub = stub
        self._request = request
        self._security = security
        self._timeout = timeout
        self._pace = pace or Pace()
        self._cursors: dict[tuple[int, int], pb.LogCursor] = {}

    async def read(self) -> AsyncGenerator[pb.StreamLogsResponse, None]:
        """Yield each piece once and in order, until the stream ends.

        Raises:
            Lost: The agent refuses, or was unreachable for too long.
        """
        retries = Retries(self._timeout, self._pace)
        while True:
            request = pb.StreamLogsRequest()
            request.CopyFrom(self._request)
            request.cursors.extend(self._cursors.values())
            call = self._stub.StreamLogs(request)
            try:
                while isinstance(piece := await call.read(), pb.StreamLogsResponse):
                    self.begun = True
                    retries.answered()
                    self._cursors[piece.cursor.local_rank, piece.cursor.stream] = piece.cursor
                    yield piece
                return
            except grpc.aio.AioRpcError as rpc_error:
                error = decode(rpc_error)
            finally:
                call.cancel()
            why = in_words(error, self._security, answered=self.begun)
            if not is_lost(error) and error.reason != "DRAINING":
                raise Lost(why)
            await retries.failed(why)


class Followed:
    """A followed job on one agent.

    Attributes:
        job: Latest state of the job there; None before the first report.
        lost: Reason why it can't be followed any more; None if it can.
    """

    def __init__(
        self,
        agent: RemoteAgent,
        launch: pb.LaunchJobRequest,
        security: ClientSecurity,
        *,
        timeout: float,
        note: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        """Store the settings.

        Args:
            launch: The request that launched the job there.
            security: How connections to the agent are secured, for advice in errors.
            timeout: Seconds that the agent may be unreachable before it counts as lost.
            note: Called with sentences about the connection.
        """
        self.agent = agent
        self.job: pb.Job | None = None
        self.lost: str | None = None
        self._launch = launch
        self._security = security
        self._timeout = timeout
        self._note = note
        self._pace = pace or Pace()

    @property
    def ended(self) -> bool:
        """True if the job has ended there, or if its state can't be known any more."""
        return self.lost is not None or (self.job is not None and self.job.state == pb.JOB_STATE_ENDED)

    async def watch(self, on_change: Callable[[Followed], None]) -> None:
        """Call `on_change` with each new state; return once `ended`."""
        retries = Retries(lambda: self._timeout, self._pace)
        try:
            while not self.ended:
                try:
                    await self._watch_once(on_change, retries)
                    continue
                except ServiceError as error:
                    why = in_words(error, self._security, answered=True)
                    if not is_lost(error) and error.reason != "DRAINING":
                        raise Lost(why) from None
                if not retries.away:
                    self._note(f"{self.agent.label}: lost the connection ({why}); trying again")
                await retries.failed(why)
        except Lost as loss:
            self.lost = str(loss)
            on_change(self)

    async def _watch_once(self, on_change: Callable[[Followed], None], retries: Retries) -> None:
        call = self.agent.stub.WatchJob(pb.WatchJobRequest(run_id=self._launch.spec.run_id))
        try:
            first = True
            while True:
                async with asyncio.timeout(FIRST_ANSWER if first else None):
                    response = await call.read()
                if not isinstance(response, pb.WatchJobResponse):
                    return
                first = False
                if retries.away:
                    self._note(f"{self.agent.label}: connected again")
                retries.answered()
                if response.job.launch_id != self._launch.launch_id:
                    raise Lost("its agent was restarted, and runs another job of that run")
                self.job = response.job
                on_change(self)
                if self.ended:
                    return
        except TimeoutError:
            raise ServiceError(grpc.StatusCode.UNAVAILABLE, "UNAVAILABLE", "no answer") from None
        except grpc.aio.AioRpcError as rpc_error:
            error = decode(rpc_error)
            if error.reason == "NO_JOB":
                raise Lost("its agent was restarted, and the job there ended with the former agent") from None
            raise error from None
        finally:
            call.cancel()

    async def follow_logs(self, take: Callable[[Followed, pb.StreamLogsResponse], Awaitable[None]]) -> None:
        """Call `take` with each piece of output, once and in order; return at its end, or if the agent is lost."""
        request = pb.StreamLogsRequest(run_id=self._launch.spec.run_id, follow=True)
        pieces = LogPieces(self.agent.stub, request, self._security, self._log_timeout, self._pace)
        pieces.begun = True  # the agent has replied to the launch
        try:
            async for piece in pieces.read():
                await take(self, piece)
        except Lost as loss:
            self._note(f"{self.agent.label}: the rest of its logs is missing here: {loss}")

    def _log_timeout(self) -> float:
        return min(self._timeout, LAST_WORDS) if self.ended else self._timeout

    async def stop(self, reason: str, *, now: bool, timeout: float) -> str | None:
        """Stop the job there; return the reason if that failed, else None."""
        if self.ended:
            return None
        request = pb.StopJobRequest(run_id=self._launch.spec.run_id, reason=reason, now=now)
        retries = Retries(lambda: timeout, self._pace)
        while True:
            try:
                await self.agent.stub.StopJob(request, timeout=timeout)
            except grpc.aio.AioRpcError as rpc_error:
                error = decode(rpc_error)
            else:
                return None
            if self.ended or error.reason == "NO_JOB":
                return None
            why = in_words(error, self._security, answered=True)
            try:
                if not is_lost(error):
                    raise Lost(why)
                await retries.failed(why)
            except Lost as loss:
                return str(loss)
