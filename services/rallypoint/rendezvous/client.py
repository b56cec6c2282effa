"""A node's membership of a run, kept over any number of streams."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import grpc

from rallypoint.rendezvous.core.state import RunSettings
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.address import Address
from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.durations import set_seconds, to_seconds
from rallypoint.rpc.errors import GONE, MOVED, UNHEARD, ServiceError, decode
from rallypoint.rpc.logs import get_logger
from rallypoint.rpc.replica_client import ReplicaConnection, Where, replica_client

# ---- Log messages about a broken stream: one when the rendezvous is lost or the run moves to another replica.


_log = get_logger(__name__)


class Outage:
    """Logs an outage once, when it begins, however many attempts it takes."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: the address, or addresses, that are tried."""
        self._endpoint = endpoint
        self._at = ""
        self._replicated = False
        self._begun = False
        self._logged = False
        self._last_error: ServiceError | None = None

    def over(self, at: str, *, replicated: bool) -> None:
        """Note that the service replied.

        Args:
            at: The address of the replica that replied.
            replicated: True if there are several replicas, and the next owner of the run is looked for among them.
        """
        self._at = at
        self._replicated = replicated
        self._begun = self._logged = False
        self._last_error = None

    def attempt_failed(self, error: ServiceError, *, admitted: bool, at_once: bool) -> None:
        """Note that a stream ended, or could not be opened.

        Args:
            error: The error of the attempt.
            admitted: The node was in the run before.
            at_once: Another replica is tried without a pause.
        """
        first, self._begun = not self._begun, True
        if error.reason not in UNHEARD:
            self._last_error = error
        if self._logged:
            return
        if admitted and self._replicated and first:
            if _is_orderly(error):
                to = error.metadata.get("owner_address") or "not known yet"
                _log.info("the run moves to another replica", before=self._at, to=to)
                return
        elif at_once:
            return  # the other replicas are tried first
        self._logged = True
        reason = _why(error if first else self._last_error or error)
        if not admitted:
            _log.warning("no answer yet, trying again", endpoint=self._endpoint, error=reason)
        elif self._replicated:
            text = "rendezvous replica lost, looking for the next owner of the run"
            _log.warning(text, replica=self._at, among=self._endpoint, error=reason)
        else:
            text = "rendezvous service lost, trying to reach it"
            _log.warning(text, endpoint=self._endpoint, error=reason)


def _why(error: ServiceError) -> str:
    """Describe why there is no stream. The text of MOVED refusals is general advice to clients: useless in this log."""
    if error.reason not in MOVED:
        return str(error)
    if cause := error.metadata.get("cause"):
        return f"the run has no owner: {cause}"
    owner = error.metadata.get("owner_address")
    return f"{owner} is still reported as the owner" if owner else "the run has no known owner"


def _is_orderly(error: ServiceError) -> bool:
    """True if the replica that owned the run drains, or names the new owner."""
    return error.reason == "DRAINING" or (error.reason in MOVED and "owner_address" in error.metadata)


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
# Reasons for which a node that was in the run before is refused for good. Any other error (of a server that was
# stalled, has another version, or listens at the address of the right one) may differ next time, and workers run.
_REFUSALS = {"RUN_CLOSED", "SETTINGS_DIFFER", "NODE_EVICTED", "JOIN_TIMED_OUT"}
# Reasons for which the lease is void, and the node must join again.
_LEASE_ENDED = {"LEASE_LOST", "LEASE_NOT_PROVEN", "RUN_NOT_FOUND", "REVISION_AHEAD"}
# Seconds past a run's join timeout after which a join that waits is given up: the service ends it before.
_WAITING_GRACE = 30.0


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease, as its node needs it to act.

    Attributes:
        number: The lease; numbers can be compared only within one incarnation of the run.
        incarnation: Incarnation of the run that granted it.
        token: The secret that proves it.
    """

    number: int
    incarnation: str = ""
    token: bytes = field(default=b"", repr=False)

    @property
    def timer_token(self) -> bytes:
        """The secret for the timer service, which can't act as the node with it; empty: the lease has none."""
        return hashlib.sha256(b"rallypoint timers " + self.token).digest() if self.token else b""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node holds a lease; `resumed`: the one it held before; `at`: the address of the server, for people."""

    held: HeldLease
    resumed: bool
    at: str = field(default="", compare=False)

    @property
    def lease(self) -> int:
        """The number of the lease."""
        return self.held.number


@dataclass(frozen=True, slots=True)
class MembershipUpdate:
    """The state of the run, as far as the node needs it."""

    update: pb.NodeUpdate


@dataclass(frozen=True, slots=True)
class MembershipReset:
    """The lease is lost; the membership joins again by itself, as a newcomer."""

    reason: str


_Report = TypeVar("_Report", pb.WorkerFailure, pb.ReportStart)
_JoinCall: TypeAlias = "grpc.aio.StreamStreamCall[pb.JoinRequest, pb.JoinResponse]"
Event: TypeAlias = Admitted | MembershipUpdate | MembershipReset


class _StreamDrained(Exception):
    """The server ends the stream because it drains; it may not have processed the last request."""


@dataclass(eq=False)
class _Moved(Exception):
    """Another replica owns the run now, even if the replica that holds the stream still claims it."""

    owner: Address


class RendezvousUnreachable(Exception):
    """No rendezvous service replied in time; the message contains the addresses and the last error."""


class Membership:
    """Joins a run, and stays in it until it leaves, the run is closed, or it is refused.

    With `stays_until_gone` in the request it also stays in a closed run, so that the run is not reopened while workers
    are alive here: call `leave` when none is. A server of an older version ends the membership with the run.

    A broken stream is opened again with back-off and jitter, for as long as it takes: the workers run on while the
    rendezvous service is down. The latest requests are sent again on the new stream: they are idempotent.
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
            where: The rendezvous service: a ReplicaClient or a channel; the caller closes it.
            endpoint: Its address, or addresses, for messages.
            request: The run to join, and the node's description.
            on_event: Called on the event loop with each event.
            connect_timeout: Seconds to try until the first reply.
            lost_timeout: Seconds to try after a lost stream. Infinite by default, since the service comes back. A
                service that ends with the job, inside the agent of one of its hosts, may not.
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
        self._held: HeldLease | None = None
        self._incarnation = ""
        self._revision = 0
        self._ever_admitted = False
        self._over = False
        self._closed = False
        self._latest: pb.JoinRequest | None = None
        # By local rank: the failure, and the loop time of the report, to which the age in the failure refers.
        self._failures: dict[int, tuple[pb.WorkerFailure, float]] = {}
        self._success: pb.ReportSuccess | None = None
        # The start of the running round, and the loop time of the report.
        self._start: tuple[pb.ReportStart, float] | None = None
        self._watchdog_trouble = ""
        self._unsent = asyncio.Event()
        self._progress = False
        self._last_error = "no reply received"
        self._outage = Outage(endpoint)

    @property
    def lease(self) -> int:
        """The lease that the node holds, as far as it knows; 0: none."""
        return self._held.number if self._held is not None else 0

    @property
    def held(self) -> HeldLease | None:
        """The same, with all that it takes to act under it."""
        return self._held

    @property
    def departing(self) -> bool:
        """True if the node has announced that it leaves."""
        return self._leaving() or (self._latest is not None and self._latest.HasField("depart"))

    async def run(self) -> None:
        """Keep the membership; returns once the run is closed, or the node has left.

        Raises:
            RendezvousUnreachable: No server replied within the connect timeout, or the lost timeout.
            ServiceError: The node was refused for good: RUN_CLOSED, SETTINGS_DIFFER, NODE_EVICTED, JOIN_TIMED_OUT, or
                LEASE_LOST because another agent joined under the node's name; a newcomer: for any lasting error.
        """
        backoff = Backoff(self._jitter.random, first=_FIRST_BACKOFF, longest=_LONGEST_BACKOFF)
        deadline = asyncio.get_running_loop().time() + self._connect_timeout
        # A node that leaves and holds no lease must not join in order to leave: it would cost a round.
        while not self._over and (self._held or not self.departing):
            self._progress = False
            error = await self._one_stream(deadline)
            if (task := asyncio.current_task()) is not None and task.cancelling():
                # gRPC loses a cancellation that arrives while a call begins and fails, and raises the failure.
                raise asyncio.CancelledError
            if self._progress:
                longest = self._lost_timeout if self._ever_admitted else self._connect_timeout
                deadline = asyncio.get_running_loop().time() + longest
            if error is not None:
                self._raise_if_final(error, deadline)
            if self._over:
                return
            if self._progress:
                backoff.reset()
            at_once = self._search.at_once and asyncio.get_running_loop().time() < deadline
            if error is not None:
                self._outage.attempt_failed(error, admitted=self._ever_admitted, at_once=at_once)
            if at_once:
                _log.debug("trying another replica", endpoint=self._endpoint, error=str(error))
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
        """Confirm that no worker of an earlier round is alive on the node; ignored if the node is leaving."""
        if not self.departing:
            self._queue(pb.JoinRequest(confirm=pb.ConfirmRound(round=round_, master_port=master_port)))

    def report_failure(self, failure: pb.WorkerFailure) -> None:
        """Report that a worker failed; the age in `failure` is as of now, and grows until the report is sent."""
        # Kept apart: if the node left before this is sent, the failure would look like a departure.
        self._failures[failure.local_rank] = failure, asyncio.get_running_loop().time()
        self._unsent.set()

    def report_start(self, start: pb.ReportStart) -> None:
        """Report that all workers of a round have started; the age in `start` is as of now."""
        self._start = start, asyncio.get_running_loop().time()
        self._unsent.set()

    def report_success(self, round_: int) -> None:
        """Report that all workers succeeded."""
        # Kept apart as well: without it, a node that leaves past the exit barrier would end the round of the others.
        self._success = pb.ReportSuccess(round=round_)
        self._unsent.set()

    def depart(self, reason: str) -> None:
        """Announce that the node stops its workers in order to leave."""
        self._queue(pb.JoinRequest(depart=pb.DepartRun(reason=reason)))

    def leave(self, reason: str) -> None:
        """Give the lease back; `run` returns when the server has processed it."""
        self._queue(pb.JoinRequest(leave=pb.LeaveRun(reason=reason)))

    def report_watchdog(self, trouble: str) -> None:
        """Report why no watchdog watches the node's workers; "": one does."""
        self._watchdog_trouble = trouble
        self._unsent.set()

    def _queue(self, request: pb.JoinRequest) -> None:
        # The latest is enough: a node that confirms is not leaving, and a node that leaves need not have confirmed.
        self._latest = request
        self._unsent.set()

    def _raise_if_final(self, error: ServiceError, deadline: float) -> None:
        """Decide whether a stream's error is worth another attempt; raise it if not."""
        if self._closed and error.reason in _LEASE_ENDED | _REFUSALS:
            self._over = True  # the node has received the end of the run, and counts as gone
            return
        if "superseded_by" in error.metadata:
            raise error  # two agents under one node name would supersede each other for ever, and neither would run
        if error.reason in _LEASE_ENDED and self._held:
            self._incarnation = self._held.incarnation
            self._held, self._revision = None, 0
            self._over = self.departing
            self._latest = self._success = self._start = None
            self._failures.clear()
            self._on_event(MembershipReset(error.message))
            return
        if error.reason in _REFUSALS if self._ever_admitted else error.code not in _RETRYABLE:
            raise error
        if asyncio.get_running_loop().time() >= deadline:
            text, timeout = "no rendezvous service answered at", self._connect_timeout
            if self._ever_admitted:
                text, timeout = "the rendezvous service is gone, none answered at", self._lost_timeout
            raise RendezvousUnreachable(f"{text} {self._endpoint} within {timeout:g} s: {self._last_error}")

    async def _one_stream(self, deadline: float) -> ServiceError | None:
        """Open one stream and use it until it ends; returns the error that ended it, None for an orderly end."""
        loop = asyncio.get_running_loop()
        try:
            connection = await self._replicas.connect(self._search, max(0.0, deadline - loop.time()))
        except ServiceError as no_connection:
            self._last_error = no_connection.message
            return no_connection
        try:
            error = await self._stream_over(connection, min(deadline, loop.time() + connection.timeout))
            if error is not None:
                connection.failed(error)
            return error
        finally:
            connection.hang_up()

    async def _stream_over(self, connection: ReplicaConnection, deadline: float) -> ServiceError | None:
        """Use one stream to one replica until it ends; fails if the first response is not there by the deadline."""
        # A node in the run waits for a connection rather than fail without one: the channel tries every second at the
        # longest, and a back-off of ours on top would double that. A newcomer wants the reason why there is none;
        # and where there are other replicas, they are tried.
        stub: pb_grpc.RendezvousServiceAsyncStub = connection.stub(pb_grpc.RendezvousServiceStub)
        call = stub.Join(wait_for_ready=self._ever_admitted and connection.waits)
        try:
            async with asyncio.timeout_at(None if deadline == math.inf else deadline) as limit:
                with contextlib.suppress(asyncio.InvalidStateError):  # ended already: read raises the error
                    await call.write(self._introduction())
                first = await call.read()
                if isinstance(first, pb.JoinResponse) and first.HasField("waiting"):
                    connection.answered()
                    self._progress = True
                    _log.warning("waiting", reason=first.waiting.detail)
                    limit.reschedule(asyncio.get_running_loop().time() + self._longest_wait())
                    first = await call.read()
            if isinstance(first, pb.JoinResponse):
                if not first.HasField("lease"):  # the server drained before it processed the request
                    raise _StreamDrained
                connection.answered()
                at = self._endpoint if connection.alone else connection.address
                self._outage.over(at, replicated=not connection.alone)
                await self._live(call, first, connection, at)
            self._over = self._over or self._leaving() or self._closed
            return None
        except TimeoutError:
            return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, "NO_ANSWER", self._last_error)
        except _Moved as moved:
            owner = {"owner_address": str(moved.owner)}
            message = f"{moved.owner} owns the run now"
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "NOT_OWNER", message, metadata=owner)
        except _StreamDrained:
            return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", "the server is going away")
        except grpc.aio.AioRpcError as error:
            self._last_error = decode(error).message
            return decode(error)
        finally:
            call.cancel()

    def _longest_wait(self) -> float:
        """Seconds for the nodes of the closed run to go; the service ends the wait before."""
        return (
            to_seconds(self._request.settings.join_timeout) or RunSettings().join_timeout
        ) + _WAITING_GRACE

    def _introduction(self) -> pb.JoinRequest:
        if (held := self._held) is None:
            join = pb.JoinRun(former_incarnation=self._incarnation)
            join.MergeFrom(self._request)
            return pb.JoinRequest(join=join)
        run_id, node_id = self._request.run_id, self._request.node_id
        resume = pb.ResumeRun(
            run_id=run_id,
            node_id=node_id,
            lease=held.number,
            after_revision=self._revision,
            token=held.token,
            stays_until_gone=self._request.stays_until_gone,
        )
        return pb.JoinRequest(resume=resume)

    async def _live(
        self, call: _JoinCall, first: pb.JoinResponse, connection: ReplicaConnection, at: str
    ) -> None:
        lease, resumed = first.lease, self._held is not None
        self._held = HeldLease(lease.number, lease.incarnation, lease.token)
        self._ever_admitted = self._progress = True
        self._on_event(Admitted(self._held, resumed, at))
        if self._requests_to_send() or self._watchdog_trouble or self._start is not None:
            self._unsent.set()
        sender = asyncio.create_task(self._send_requests(call, to_seconds(lease.keep_alive_interval)))
        moved: list[Address] = []
        try:
            async with asyncio.timeout(None) as given_up:

                def leave_for(owner: Address) -> None:
                    # The replica of this stream may be paused, and send nothing. If it still is the owner (another call
                    # got `owner` from some replica, which may be wrong), one refusal brings the node back.
                    moved.append(owner)
                    given_up.reschedule(asyncio.get_running_loop().time())

                connection.when_moved(leave_for)
                response: object = first
                while isinstance(response, pb.JoinResponse):
                    if response.HasField("update"):
                        self._take(response.update)
                    if response.HasField("draining"):
                        raise _StreamDrained
                    response = await call.read()
        except TimeoutError:
            raise _Moved(moved[-1]) from None
        finally:
            sender.cancel()

    def _take(self, update: pb.NodeUpdate) -> None:
        self._revision = max(self._revision, update.revision)
        self._closed = update.phase == pb.PHASE_CLOSED
        self._over = self._closed and not self._request.stays_until_gone
        self._forget_reports_of_other_rounds(update)
        if update.settling:
            self._unsent.set()  # a heartbeat at once: the service waits for a sign of life from each participant
        self._on_event(MembershipUpdate(update))

    async def _send_requests(self, call: _JoinCall, interval: float) -> None:
        """Send requests as they come; if none comes for `interval` seconds, a heartbeat."""
        sent_trouble, sent_start = "", None
        while True:
            requests: list[pb.JoinRequest] = []
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval):
                    await self._unsent.wait()
                self._unsent.clear()
                requests = self._requests_to_send()
            if self._start is not None and self._start is not sent_start:
                sent_start = self._start
                requests.insert(0, pb.JoinRequest(started=_aged(*sent_start)))
            trouble = self._watchdog_trouble
            if not requests or trouble != sent_trouble:
                sent_trouble = trouble
                requests.append(pb.JoinRequest(heartbeat=pb.Heartbeat(watchdog_trouble=trouble)))
            try:
                for message in requests:
                    await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # the stream is over; its reader gets the error

    def _requests_to_send(self) -> list[pb.JoinRequest]:
        """Return the requests that the server may not have received, in the order in which it must get them."""
        requests = [pb.JoinRequest(worker_failed=_aged(*report)) for report in self._failures.values()]
        if self._success is not None:
            requests.append(pb.JoinRequest(succeeded=self._success))
        if self._latest is not None:
            requests.append(self._latest)
        return requests

    def _forget_reports_of_other_rounds(self, update: pb.NodeUpdate) -> None:
        running = update.assignment.round if update.phase == pb.PHASE_FINAL else 0
        # A failure of the round before may prove to be its first one, until the next round runs.
        wanted = running or update.last_round_end.round
        self._failures = {
            worker: report for worker, report in self._failures.items() if report[0].round == wanted
        }
        if self._success is not None and self._success.round != running:
            self._success = None
        if self._start is not None and (self._start[0].round != running or update.start_recorded):
            self._start = None

    def _leaving(self) -> bool:
        return self._latest is not None and self._latest.HasField("leave")


def _aged(report: _Report, since: float) -> _Report:
    """Return a copy of a report that was made at that loop time, with its present age."""
    aged = type(report)()
    aged.CopyFrom(report)
    set_seconds(aged.age, to_seconds(report.age) + asyncio.get_running_loop().time() - since)
    return aged
