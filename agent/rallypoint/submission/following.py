"""Follows a job on one agent: its states and its logs, over connections that break, until it has ended or is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass

import grpc

from rallypoint.agent.v1 import supervisor_service_pb2 as pb
from rallypoint.agent.v1 import supervisor_service_pb2_grpc as pb_grpc
from rallypoint.rpc.endpoint import ClientTLS, parse_endpoint
from rallypoint.rpc.errors import GONE, ServiceError, decode, tls_advice
from rallypoint.rpc.pace import Pace

# ---- An agent on another host: what it is called, and how its calls are made over a network that may break.


@dataclass(frozen=True, slots=True, eq=False)
class RemoteAgent:
    """An agent of a job.

    Attributes:
        endpoint: Where it is.
        label: What it is called before lines of output.
        stub: To call it.
    """

    endpoint: str
    label: str
    stub: pb_grpc.SupervisorServiceAsyncStub


def labels(endpoints: Sequence[str]) -> list[str]:
    """Short names of agents: their hosts, or the whole endpoints of those that share one."""
    hosts = [parse_endpoint(endpoint).host for endpoint in endpoints]
    return [
        host if host and hosts.count(host) == 1 else endpoint
        for host, endpoint in zip(hosts, endpoints, strict=True)
    ]


def is_lost(error: ServiceError) -> bool:
    """Whether a call has failed for a connection, or an agent that is busy, rather than for what it asked."""
    if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return error.retry_after is not None
    if error.reason in ("UNEXPECTED_ERROR", "SUBSCRIBER_TOO_SLOW", "LOGS_UNREADABLE"):
        return True
    # An agent that refuses, or that goes away and says so, gives a reason of its own.
    return error.reason == error.code.name and error.code in (*GONE, grpc.StatusCode.DEADLINE_EXCEEDED)


def in_words(error: ServiceError, tls: ClientTLS | None, *, answered: bool = False) -> str:
    """Why an agent could not be asked, or refused.

    Args:
        error: What came of the call.
        tls: What is spoken with it; None for plaintext.
        answered: Whether it ever has: then nothing is wrong with the certificates.
    """
    if error.reason == grpc.StatusCode.UNIMPLEMENTED.name:
        return f"no agent answers there ({error.message})"
    if error.reason != error.code.name:
        return f"{error.message} ({error.reason})"
    advice = tls_advice(error.message, tls) if not answered else None
    return error.message + (f"; {advice}" if advice else "")


FIRST_ANSWER = 10.0
"""Seconds within which a stream must bring its first message, or it counts as broken."""

LAST_WORDS = 3.0
"""Seconds for which an agent is tried that has gone after the end of its job, for the rest of the output."""


class Lost(Exception):
    """The agent can't be followed any more; one line that says why."""


class Retries:
    """How long to go on trying while an agent is away."""

    def __init__(self, patience: Callable[[], float], pace: Pace) -> None:
        """`patience`: seconds that it may be away before it counts as lost, as things are."""
        self._timeout = patience
        self._pace = pace
        self._since: float | None = None
        self._backoff = pace.backoff()

    @property
    def away(self) -> bool:
        """Whether it did not answer the last time."""
        return self._since is not None

    def answered(self) -> None:
        """It is there."""
        self._since = None
        self._backoff.reset()

    async def failed(self, why: str) -> None:
        """It did not answer; returns when to try again.

        Raises:
            Lost: That has gone on for too long.
        """
        now = self._pace.clock()
        if self._since is None:
            self._since = now
        if (waited := now - self._since) >= self._timeout():
            raise Lost(f"it has not answered for {waited:.0f} s: {why}" if waited >= 1.0 else why)
        await self._pace.sleep(self._backoff.next())


class LogPieces:
    """The pieces of a stream of logs, read on after every break where that came.

    Attributes:
        begun: whether the agent has answered yet.
    """

    def __init__(
        self,
        stub: pb_grpc.SupervisorServiceAsyncStub,
        request: pb.StreamLogsRequest,
        tls: ClientTLS | None,
        patience: Callable[[], float],
        pace: Pace | None = None,
    ) -> None:
        """Set up.

        Args:
            stub: Of the agent.
            request: What is wanted.
            tls: What is spoken with the agent, for advice.
            patience: Seconds that it may be away, as things are.
            pace: How time passes.
        """
        self.begun = False
        self._stub = stub
        self._request = request
        self._tls = tls
        self._timeout = patience
        self._pace = pace or Pace()
        self._cursors: dict[tuple[int, int], pb.LogCursor] = {}

    async def read(self) -> AsyncGenerator[pb.StreamLogsResponse, None]:
        """Each piece, in order and once; ends where the stream does.

        Raises:
            Lost: The agent refuses, or was away for too long.
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
            why = in_words(error, self._tls, answered=self.begun)
            if not is_lost(error) and error.reason != "DRAINING":
                raise Lost(why)
            await retries.failed(why)


class Followed:
    """One agent of a job.

    Attributes:
        agent: which.
        job: its latest state there; None before it was first told.
        lost: why it can't be followed any more; None if that is not so.
    """

    def __init__(
        self,
        agent: RemoteAgent,
        launch: pb.LaunchJobRequest,
        tls: ClientTLS | None,
        *,
        patience: float,
        note: Callable[[str], None],
        pace: Pace | None = None,
    ) -> None:
        """Set up.

        Args:
            agent: Which.
            launch: By which the job was launched there.
            tls: What is spoken with it, for advice.
            patience: Seconds that it may be away before it counts as lost.
            note: Takes a sentence about the connection.
            pace: How time passes.
        """
        self.agent = agent
        self.job: pb.Job | None = None
        self.lost: str | None = None
        self._launch = launch
        self._tls = tls
        self._timeout = patience
        self._note = note
        self._pace = pace or Pace()

    @property
    def ended(self) -> bool:
        """Whether the job has ended there, as far as can be known."""
        return self.lost is not None or (self.job is not None and self.job.state == pb.JOB_STATE_ENDED)

    async def watch(self, on_change: Callable[[Followed], None]) -> None:
        """Call `on_change` with each new state; returns once `ended`."""
        retries = Retries(lambda: self._timeout, self._pace)
        try:
            while not self.ended:
                try:
                    await self._watch_once(on_change, retries)
                    continue
                except ServiceError as error:
                    why = in_words(error, self._tls, answered=True)
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
                raise Lost("its agent was restarted, and the job there ended with the one before") from None
            raise error from None
        finally:
            call.cancel()

    async def follow_logs(self, take: Callable[[Followed, pb.StreamLogsResponse], Awaitable[None]]) -> None:
        """Call `take` with each piece of output, in order and once each; returns at the end of it, or if lost."""
        request = pb.StreamLogsRequest(run_id=self._launch.spec.run_id, follow=True)
        pieces = LogPieces(self.agent.stub, request, self._tls, self._log_timeout, self._pace)
        pieces.begun = True  # it has answered the launch
        try:
            async for piece in pieces.read():
                await take(self, piece)
        except Lost as loss:
            self._note(f"{self.agent.label}: the rest of its logs is missing here: {loss}")

    def _log_timeout(self) -> float:
        return min(self._timeout, LAST_WORDS) if self.ended else self._timeout

    async def stop(self, reason: str, *, now: bool, timeout: float) -> str | None:
        """Have the job stop there; why it could not be told to, if so."""
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
            why = in_words(error, self._tls, answered=True)
            try:
                if not is_lost(error):
                    raise Lost(why)
                await retries.failed(why)
            except Lost as loss:
                return str(loss)
