"""Event streams for the command line: the last retained events, then new ones, across broken connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import grpc

from rallypoint.cli.operator import refusal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.errors import GONE, ServiceError, decode
from rallypoint.rpc.replica_client import ReplicaClient, ReplicaConnection

_PAGE = 10_000  # the largest page that the service sends
# Bounds of the first and the longest delay between connection attempts, seconds.
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 1.0
# Codes after which the same stream may be opened again.
_RETRYABLE = GONE | {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def last_events(
    stub: pb_grpc.RendezvousServiceAsyncStub, run_id: str, wanted: pb.EventFilter, most: int
) -> tuple[list[pb.Event], bool]:
    """Return the last `most` matching events of a run, oldest first, and True if there are older ones.

    Raises:
        AioRpcError: The service refused the call or is unreachable.
    """
    events: list[pb.Event] = []
    token = ""
    while len(events) <= most:  # one event more than requested shows that there are older ones
        size = min(_PAGE, most + 1 - len(events))
        request = pb.ListEventsRequest(
            run_id=run_id, filter=wanted, page_size=size, page_token=token, newest_first=True
        )
        try:
            page = await stub.ListEvents(request)
        except grpc.aio.AioRpcError as error:
            if events and decode(error).reason == "EVENTS_COMPACTED":  # older events were dropped meanwhile
                break
            raise
        events += page.events
        token = page.next_page_token
        if not token:
            break
    return events[:most][::-1], len(events) > most


class Following:
    """Follow a run's events across connections until the run is closed."""

    def __init__(
        self,
        service: CallTarget,
        request: pb.WatchEventsRequest,
        *,
        on_events: Callable[[Sequence[pb.Event]], None],
        on_gap: Callable[[str], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Store the settings; `run` does the work.

        Args:
            service: The rendezvous service; its timeout is for how long it may be unreachable, or silent after the
                first request.
            on_events: Called with each batch of new events.
            on_gap: Called with a sentence if events were lost because they are no longer retained.
            jitter: Returns a random number from 0 to 1, for the back-off.
        """
        self._service = service
        self._request = pb.WatchEventsRequest()
        self._request.CopyFrom(request)
        self._timeout = service.timeout
        self._on_events = on_events
        self._on_gap = on_gap
        self._jitter = jitter
        self._requested_at = 0.0
        self._received_at: float | None = None  # time of the last message; None: none yet
        # True after an absence longer than the timeout: one attempt is left. It may be this process that was absent:
        # stopped on a terminal, or suspended with its machine.
        self._last_attempt = False

    async def run(self) -> None:
        """Follow the events until the run is closed.

        Raises:
            SettingError: The service refused, or was unreachable for too long; one line.
        """
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._jitter, first=_FIRST_BACKOFF, longest=_LONGEST_BACKOFF)
        async with ReplicaClient(self._service.endpoint, self._service.security) as client:
            search = client.search()
            self._requested_at = loop.time()
            while True:
                received_before = self._received_at
                try:
                    connection = await client.connect(search, self._timeout)
                    try:
                        await self._follow_once(connection, loop)
                    finally:
                        connection.hang_up()
                    return
                except ServiceError as error:
                    if search.at_once:
                        continue
                    self._check_retryable(error, loop.time())
                except TimeoutError:
                    self._check_silence()
                client.rest(search)
                if self._received_at != received_before:
                    backoff.reset()
                await asyncio.sleep(backoff.next())

    async def _follow_once(self, replica: ReplicaConnection, loop: asyncio.AbstractEventLoop) -> None:
        """Follow over one connection.

        Raises:
            ServiceError: The stream broke, or this replica was silent and another one can be tried.
            TimeoutError: No message came in time, and there is no other replica.
        """
        stub: pb_grpc.RendezvousServiceAsyncStub = replica.stub(pb_grpc.RendezvousServiceStub)
        call = stub.WatchEvents(self._request)
        received = False
        try:
            async with asyncio.timeout(min(self._timeout, replica.timeout)) as silence:
                async for response in call:
                    if not received:
                        replica.answered()
                    received = True
                    silence.reschedule(None)  # the first message is immediate, later ones come with events
                    self._request.after_revision = response.revision
                    if response.events:
                        self._on_events(response.events)
        except grpc.aio.AioRpcError as rpc_error:
            error = decode(rpc_error)
            replica.failed(error)
            raise error from None
        except TimeoutError:
            if replica.alone:
                raise
            message = f"{replica.address} gave no answer within {min(self._timeout, replica.timeout):g} s"
            error = ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ANSWER", message)
            replica.failed(error)
            raise error from None
        finally:
            if received:
                self._received_at = loop.time()
                self._last_attempt = False
            call.cancel()

    def _check_silence(self) -> None:
        """Raise SettingError unless another attempt is due."""
        if self._received_at is None or self._last_attempt:
            raise SettingError(
                f"no rendezvous service answered at {self._service.endpoint} within {self._timeout:g} s"
            ) from None
        self._last_attempt = True

    def _check_retryable(self, error: ServiceError, now: float) -> None:
        """Raise SettingError unless another attempt is due."""
        if self._is_gap(error):
            return
        if error.code in _RETRYABLE and self._received_at is not None and not self._last_attempt:
            self._last_attempt = now - self._received_at >= self._timeout
            return
        # The run has no owner at present, and will get one.
        if (
            error.reason == "NOT_OWNER"
            and self._received_at is None
            and now < self._requested_at + self._timeout
        ):
            return
        raise refusal(self._service, error) from None

    def _is_gap(self, error: ServiceError) -> bool:
        if error.reason != "EVENTS_COMPACTED":
            return False
        oldest = error.metadata.get("oldest_revision", "?")
        self._on_gap(
            f"events {self._request.after_revision + 1} to {oldest} (not included) are no longer kept"
        )
        self._request.after_revision = 0
        return True
