"""A node's membership of a run, kept over any number of streams."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.address import Address
from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.errors import GONE, MOVED, UNHEARD, ServiceError, decode
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.replica_client import ReplicaConnection, Where, replica_client

# ---- What people are told of the time between two streams: once, that the rendezvous was lost, or that the run moved.


_log = get_logger(__name__)


class Outage:
    """Tells of an outage when it begins, however many attempts it takes."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: where is looked for the service."""
        self._endpoint = endpoint
        self._at = ""
        self._sought = False
        self._begun = False
        self._logged = False
        self._last_error: ServiceError | None = None

    def over(self, at: str, *, sought: bool) -> None:
        """The service answered.

        Args:
            at: The address of who did.
            sought: Whether there are several replicas, among which the next one is looked for.
        """
        self._at = at
        self._sought = sought
        self._begun = self._logged = False
        self._last_error = None

    def attempt_failed(self, error: ServiceError, *, admitted: bool, at_once: bool) -> None:
        """A stream ended, or there was none.

        Args:
            error: With what.
            admitted: The node was in the run before.
            at_once: Somebody else is asked without a pause.
        """
        first, self._begun = not self._begun, True
        if error.reason not in UNHEARD:
            self._last_error = error
        if self._logged:
            return
        if admitted and self._sought and first:
            if _is_orderly(error):
                to = error.metadata.get("owner") or "not known yet"
                _log.info("the run moves to another replica", before=self._at, to=to)
                return
        elif at_once:
            return  # others are asked first
        self._logged = True
        reason = _why(error if first else self._last_error or error)
        if not admitted:
            _log.warning("no answer yet, trying again", endpoint=self._endpoint, error=reason)
        elif self._sought:
            what = "rendezvous replica lost, looking for the next owner of the run"
            _log.warning(what, replica=self._at, among=self._endpoint, error=reason)
        else:
            what = "rendezvous service lost, trying to reach it"
            _log.warning(what, endpoint=self._endpoint, error=reason)


def _why(error: ServiceError) -> str:
    """Why there is no stream. What is refused to clients in general is of no use to who reads of this one."""
    if error.reason not in MOVED:
        return str(error)
    if cause := error.metadata.get("cause"):
        return f"nobody owns it: {cause}"
    owner = error.metadata.get("owner")
    return f"{owner} is still named as its owner" if owner else "nobody is known to own it"


def _is_orderly(error: ServiceError) -> bool:
    """Whether who had the run says where it is now, or that it goes."""
    return error.reason == "DRAINING" or (error.reason in MOVED and "owner" in error.metadata)


# Wait between two attempts to connect, seconds: each drawn from 0 to a bound that doubles from the first
# to the longest, so that a thousand nodes which lost the same server don't come back in step.
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 1.0

# Codes after which the same stream may be opened again by a newcomer.
_RETRYABLE = GONE | {
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
# Reasons for which a node that was in the run before is refused for good. Whatever else is answered (by a server that
# was stalled, is of another version, or stands in the place of the right one) may differ next time, and workers run.
_REFUSALS = {"RUN_CLOSED", "SETTINGS_DIFFER", "NODE_EVICTED", "JOIN_TIMED_OUT"}
# Reasons for which a lease is worth nothing any more, and only joining anew helps.
_LEASE_ENDED = {"LEASE_LOST", "RUN_NOT_FOUND", "REVISION_AHEAD"}


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node holds a lease; `resumed`: the one it held before; `at`: the address of who says so, for people.

    Numbers of leases are to be compared within one `incarnation` of the run only.
    """

    lease: int
    resumed: bool
    at: str = field(default="", compare=False)
    incarnation: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MembershipUpdate:
    """The run's state as the node must know it."""

    update: pb.NodeUpdate


@dataclass(frozen=True, slots=True)
class MembershipReset:
    """The lease is lost; the membership joins anew by itself, as a newcomer."""

    reason: str


_JoinCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]"
Event: TypeAlias = Admitted | MembershipUpdate | MembershipReset


class _ServerDraining(Exception):
    """The server ends the stream because it is going away; it may not have taken what it was told last."""


@dataclass(eq=False)
class _Moved(Exception):
    """Another replica owns the run now, whatever the one with the stream says."""

    owner: Address


class RendezvousUnreachable(Exception):
    """No rendezvous service answered in time; the message says where and what was tried."""


class Membership:
    """Joins a run, and stays in it until it leaves, the run is closed, or it is refused.

    Streams come and go beneath it. A broken one is opened again with back-off and jitter, for as long as it
    takes: a rendezvous service that is away stops nobody. Whatever the node last said is said again on the new
    stream, since the server takes it twice without harm.
    """

    def __init__(
        self,
        where: Where,
        endpoint: str,
        request: pb.JoinRun,
        on_event: Callable[[Event], None],
        *,
        connect_timeout: float = 60.0,
        lost_timeout: float = math.inf,
        jitter: random.Random | None = None,
    ) -> None:
        """Set up; `run` does the work.

        Args:
            where: The rendezvous service: a switchboard, or a channel; stays the caller's to close.
            endpoint: Its address, or addresses, for messages.
            request: What to join, and as whom.
            on_event: Called, on the event loop, with everything the node must know.
            connect_timeout: Seconds to try for the first answer.
            lost_timeout: Seconds to try for each further one. Without end, as a rule: the service comes back. One that
                ends with the job, inside the agent of one of its hosts, may not.
            jitter: Randomness of the back-off.
        """
        self._replicas = replica_client(where)
        self._search = self._replicas.search()
        self._endpoint = endpoint
        self._request = request
        self._on_event = on_event
        self._connect_timeout = connect_timeout
        self._lost_timeout = lost_timeout
        self._jitter = jitter or random.Random()  # noqa: S311 (spreads load, guards nothing)
        self._lease = 0
        self._revision = 0
        self._ever_admitted = False
        self._over = False
        self._statement: pb.JoinRequest | None = None
        # By worker: what failed, and when that was said first, which is as old as it says.
        self._failures: dict[int, tuple[pb.WorkerFailure, float]] = {}
        self._success: pb.ReportSuccess | None = None
        self._watchdog_trouble = ""
        self._unsaid = asyncio.Event()
        self._progress = False
        self._last_error = "no answer came"
        self._outage = Outage(endpoint)

    @property
    def lease(self) -> int:
        """The lease that the node holds, as far as it knows; 0: none."""
        return self._lease

    async def run(self) -> None:
        """Be a member; returns once the run is closed, or the node has left.

        Raises:
            RendezvousUnreachable: Nobody answered within the connect timeout, or the lost timeout.
            ServiceError: The node was refused for good: RUN_CLOSED, SETTINGS_DIFFER, NODE_EVICTED, JOIN_TIMED_OUT, or
                LEASE_LOST because another agent joined under the node's name; a newcomer, for whatever does not pass.
        """
        backoff = Backoff(self._jitter.random, first=_FIRST_BACKOFF, longest=_LONGEST_BACKOFF)
        deadline = asyncio.get_running_loop().time() + self._connect_timeout
        # Who is going and holds nothing to give back must not join for the sake of leaving: it would cost a round.
        while not self._over and (self._lease or not self._leaving_or_departing()):
            self._progress = False
            error = await self._one_stream(deadline)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # gRPC loses a cancellation that reaches it while a call begins and fails, and raises the failure.
                raise asyncio.CancelledError
            if self._progress:
                deadline = asyncio.get_running_loop().time() + self._lost_timeout
            if error is not None:
                self._judge(error, deadline)
            if self._over:
                return
            if self._progress:
                backoff.reset()
            at_once = self._search.at_once and asyncio.get_running_loop().time() < deadline
            if error is not None:
                self._outage.attempt_failed(error, admitted=self._ever_admitted, at_once=at_once)
            if at_once:
                _log.debug("asking another replica", endpoint=self._endpoint, error=str(error))
                continue
            self._replicas.rest(self._search)
            pause = backoff.next()
            if error is not None and (
                error.code is grpc.StatusCode.RESOURCE_EXHAUSTED or error.reason in MOVED
            ):
                pause = max(pause, (error.retry_after or 0.0) * (1 + self._jitter.random() / 2))
            if deadline < math.inf:
                pause = min(pause, max(0.0, deadline - asyncio.get_running_loop().time()))
            _log.debug("trying again", endpoint=self._endpoint, error=str(error), retry_in=round(pause, 3))
            await asyncio.sleep(pause)

    def confirm(self, round_: int, master_port: int) -> None:
        """Say that no worker of an earlier round is alive on the node; of no matter for one that is going."""
        if not self._leaving_or_departing():
            self._queue(pb.JoinRequest(confirm=pb.ConfirmRound(round=round_, master_port=master_port)))

    def report_failure(self, failure: pb.WorkerFailure) -> None:
        """Say that a worker failed; its age, as of now, goes on growing until it is heard."""
        # Kept apart: a node that leaves before this is heard would make a failure look like a departure.
        self._failures[failure.local_rank] = failure, asyncio.get_running_loop().time()
        self._unsaid.set()

    def report_success(self, round_: int) -> None:
        """Say that all workers succeeded."""
        # Kept apart as well: without it, who leaves past the exit barrier would end the round of those still at work.
        self._success = pb.ReportSuccess(round=round_)
        self._unsaid.set()

    def depart(self, reason: str) -> None:
        """Say that the node stops its workers in order to leave."""
        self._queue(pb.JoinRequest(depart=pb.DepartRun(reason=reason)))

    def leave(self, reason: str) -> None:
        """Give the lease back; `run` returns when the server has taken it."""
        self._queue(pb.JoinRequest(leave=pb.LeaveRun(reason=reason)))

    def report_watchdog(self, trouble: str) -> None:
        """Say why no watchdog guards the node's workers; "": one does."""
        self._watchdog_trouble = trouble
        self._unsaid.set()

    def _queue(self, statement: pb.JoinRequest) -> None:
        # The latest is enough: who confirms a round is not leaving, and who leaves has no need to have confirmed.
        self._statement = statement
        self._unsaid.set()

    def _judge(self, error: ServiceError, deadline: float) -> None:
        """Decide whether a stream's error is worth another attempt; raise it if not."""
        if "superseded_by" in error.metadata:
            raise error  # two agents that join over one another, in turn, would let nobody run
        if error.reason in _LEASE_ENDED and self._lease:
            self._lease = self._revision = 0
            self._over = self._leaving_or_departing()
            self._statement = self._success = None
            self._failures.clear()
            self._on_event(MembershipReset(error.message))
            return
        if error.reason in _REFUSALS if self._ever_admitted else error.code not in _RETRYABLE:
            raise error
        if asyncio.get_running_loop().time() >= deadline:
            what, timeout = "no rendezvous service answered at", self._connect_timeout
            if self._ever_admitted:
                what, timeout = "the rendezvous service is gone, none answered at", self._lost_timeout
            raise RendezvousUnreachable(f"{what} {self._endpoint} within {timeout:g} s: {self._last_error}")

    async def _one_stream(self, deadline: float) -> ServiceError | None:
        """Live through one stream; returns the error that ended it, None for an orderly end."""
        loop = asyncio.get_running_loop()
        try:
            line = await self._replicas.connect(self._search, max(0.0, deadline - loop.time()))
        except ServiceError as no_connection:
            self._last_error = no_connection.message
            return no_connection
        try:
            error = await self._stream_over(line, min(deadline, loop.time() + line.timeout))
            if error is not None:
                line.failed(error)
            return error
        finally:
            line.hang_up()

    async def _stream_over(self, line: ReplicaConnection, deadline: float) -> ServiceError | None:
        """Live through one stream to one replica; the first answer is there by the deadline, or it is given up."""
        # Once in, wait for a connection rather than fail for want of one: the channel tries every second at the
        # longest, and a back-off of ours on top would double that. Before, the reason for there being none is wanted;
        # and where there are other replicas, they are asked.
        stub: pb_grpc.RendezvousServiceAsyncStub = line.stub(pb_grpc.RendezvousServiceStub)
        call = stub.Join(wait_for_ready=self._ever_admitted and line.alone)
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline):
                with contextlib.suppress(asyncio.InvalidStateError):  # it has ended already: read tells how
                    await call.write(self._introduction())
                first = await call.read()
            if isinstance(first, pb.JoinResponse):
                if not first.HasField("lease"):  # the server went away before it got to it
                    raise _ServerDraining
                line.answered()
                at = self._endpoint if line.alone else line.address
                self._outage.over(at, sought=not line.alone)
                await self._live(call, first, line, at)
            self._over = self._over or self._leaving()
            return None
        except TimeoutError:
            return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "NO_ANSWER", self._last_error)
        except _Moved as moved:
            owner = {"owner": str(moved.owner)}
            message = f"{moved.owner} owns the run now"
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "NOT_OWNER", message, metadata=owner)
        except _ServerDraining:
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is going away")
        except grpc.aio.AioRpcError as error:
            self._last_error = decode(error).message
            return decode(error)
        finally:
            call.cancel()

    def _introduction(self) -> pb.JoinRequest:
        if not self._lease:
            return pb.JoinRequest(join=self._request)
        run_id, node_id = self._request.run_id, self._request.node_id
        resume = pb.ResumeRun(run_id=run_id, node_id=node_id, lease=self._lease, revision=self._revision)
        return pb.JoinRequest(resume=resume)

    async def _live(self, call: _JoinCall, first: pb.JoinResponse, line: ReplicaConnection, at: str) -> None:
        lease, resumed = first.lease, bool(self._lease)
        self._lease, self._ever_admitted, self._progress = lease.lease, True, True
        self._on_event(Admitted(lease.lease, resumed, at, lease.incarnation))
        if self._statements() or self._watchdog_trouble:
            self._unsaid.set()
        speaker = asyncio.create_task(
            self._send_requests(call, lease.keep_alive_interval.ToNanoseconds() / 1e9)
        )
        moved: list[Address] = []
        try:
            async with asyncio.timeout(None) as given_up:

                def leave_for(owner: Address) -> None:
                    # Who has this stream may be paused, and would not tell. Should it be the owner all the same, since
                    # what was answered elsewhere is what any replica answers, the way back is one refusal long.
                    moved.append(owner)
                    given_up.reschedule(asyncio.get_running_loop().time())

                line.when_moved(leave_for)
                response: object = first
                while isinstance(response, pb.JoinResponse):
                    if response.HasField("update"):
                        self._take(response.update)
                    if response.HasField("draining"):
                        raise _ServerDraining
                    response = await call.read()
        except TimeoutError:
            raise _Moved(moved[-1]) from None
        finally:
            speaker.cancel()

    def _take(self, update: pb.NodeUpdate) -> None:
        self._revision = max(self._revision, update.revision)
        self._over = update.phase == pb.PHASE_CLOSED
        self._forget_reports_of_other_rounds(update)
        if update.settling:
            self._unsaid.set()  # a heartbeat at once: the service waits for a sign of life of each participant
        self._on_event(MembershipUpdate(update))

    async def _send_requests(self, call: _JoinCall, interval: float) -> None:
        """Say what is to be said, and, where there is nothing for so long, that the node is alive."""
        said = ""
        while True:
            statements: list[pb.JoinRequest] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._unsaid.wait()
                self._unsaid.clear()
                statements = self._statements()
            trouble = self._watchdog_trouble
            if not statements or trouble != said:
                said = trouble
                statements.append(pb.JoinRequest(heartbeat=pb.Heartbeat(watchdog_trouble=trouble)))
            try:
                for message in statements:
                    await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream is over; whoever reads it learns why

    def _statements(self) -> list[pb.JoinRequest]:
        """What the server may not have heard, in the order in which it must."""
        said: list[pb.JoinRequest] = []
        now = asyncio.get_running_loop().time()
        said += [
            pb.JoinRequest(worker_failed=_aged(failure, now - since))
            for failure, since in self._failures.values()
        ]
        if self._success is not None:
            said.append(pb.JoinRequest(succeeded=self._success))
        if self._statement is not None:
            said.append(self._statement)
        return said

    def _forget_reports_of_other_rounds(self, update: pb.NodeUpdate) -> None:
        running = update.assignment.round if update.phase == pb.PHASE_FINAL else 0
        # What failed in the round before may have been its first failure, until the next round runs.
        wanted = running or update.last_round_end.round
        self._failures = {
            worker: report for worker, report in self._failures.items() if report[0].round == wanted
        }
        if self._success is not None and self._success.round != running:
            self._success = None

    def _leaving(self) -> bool:
        return self._statement is not None and self._statement.HasField("leave")

    def _leaving_or_departing(self) -> bool:
        return self._leaving() or (self._statement is not None and self._statement.HasField("depart"))


def _aged(failure: pb.WorkerFailure, seconds: float) -> pb.WorkerFailure:
    """A failure as it is told so many seconds after it was reported first."""
    aged = pb.WorkerFailure()
    aged.CopyFrom(failure)
    aged.age.FromNanoseconds(failure.age.ToNanoseconds() + round(seconds * 1e9))
    return aged
