"""How the command line gets events: the last ones that are kept, and then what comes, over broken connections."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

import grpc

from rallypoint.cli.operator import refusal
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.backoff import Backoff
from rallypoint.rpc.endpoint import ClientTLS, SettingError
from rallypoint.rpc.errors import GONE, ServiceError, decode
from rallypoint.rpc.replica_client import ReplicaClient, ReplicaConnection

_PAGE = 10_000  # the most that a page may have
# Bounds of the seconds between attempts to connect.
_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 1.0
# After these the same stream may be opened again.
_RETRYABLE = GONE | {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def last_events(
    stub: pb_grpc.RendezvousServiceAsyncStub, run_id: str, wanted: pb.EventFilter, most: int
) -> tuple[list[pb.Event], bool]:
    """The last events of a run that are wanted, oldest first, and whether there are older ones.

    Raises:
        AioRpcError: The service refused, or could not be reached.
    """
    events: list[pb.Event] = []
    token = ""
    while len(events) <= most:  # one more than is asked for tells whether there are older ones
        size = min(_PAGE, most + 1 - len(events))
        request = pb.ListEventsRequest(
            run_id=run_id, filter=wanted, page_size=size, page_token=token, newest_first=True
        )
        try:
            page = await stub.ListEvents(request)
        except grpc.aio.AioRpcError as error:
            if events and decode(error).reason == "EVENTS_COMPACTED":  # older ones went meanwhile
                break
            raise
        events += page.events
        token = page.next_page_token
        if not token:
            break
    return events[:most][::-1], len(events) > most


class Following:
    """Follows a run's events until the run is closed, from one connection to the next."""

    def __init__(
        self,
        endpoint: str,
        tls: ClientTLS | None,
        request: pb.WatchEventsRequest,
        *,
        patience: float,
        on_events: Callable[[Sequence[pb.Event]], None],
        on_gap: Callable[[str], None],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """Set up; `run` does the work.

        Args:
            endpoint: Of the rendezvous service.
            tls: How to speak with it.
            request: What to follow.
            patience: Seconds that the service may be away, or silent when it is first asked.
            on_events: Called with what came.
            on_gap: Called with a sentence where events were lost, because they are no longer kept.
            jitter: A random number from 0 to 1, for the back-off.
        """
        self._endpoint = endpoint
        self._tls = tls
        self._request = pb.WatchEventsRequest()
        self._request.CopyFrom(request)
        self._timeout = patience
        self._on_events = on_events
        self._on_gap = on_gap
        self._jitter = jitter
        self._requested_at = 0.0
        self._received_at: float | None = None  # when the service was last there, once it was
        # Whether it has been away for too long, and is asked for the last time. It may be this process that was
        # away: stopped on a terminal, or asleep with its machine.
        self._last_time = False

    async def run(self) -> None:
        """Follow to the end of the run.

        Raises:
            SettingError: The service refused, could not be reached, or was away for too long; one line.
        """
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._jitter, first=_FIRST_BACKOFF, longest=_LONGEST_BACKOFF)
        async with ReplicaClient(self._endpoint, self._tls) as board:
            search = board.search()
            self._requested_at = loop.time()
            while True:
                heard_before = self._received_at
                try:
                    line = await board.connect(search, self._timeout)
                    try:
                        await self._follow_once(line, loop)
                    finally:
                        line.hang_up()
                    return
                except ServiceError as error:
                    if search.at_once:
                        continue
                    self._bear(error, loop.time())
                except TimeoutError:
                    self._bear_silence()
                board.rest(search)
                if self._received_at != heard_before:
                    backoff.reset()
                await asyncio.sleep(backoff.next())

    async def _follow_once(self, line: ReplicaConnection, loop: asyncio.AbstractEventLoop) -> None:
        """Follow over one connection.

        Raises:
            ServiceError: It ended so.
            TimeoutError: Nothing was heard for as long as one is to wait, and there is nobody else to ask.
        """
        stub: pb_grpc.RendezvousServiceAsyncStub = line.stub(pb_grpc.RendezvousServiceStub)
        call = stub.WatchEvents(self._request)
        heard = False
        try:
            async with asyncio.timeout(min(self._timeout, line.timeout)) as silence:
                async for response in call:
                    if not heard:
                        line.answered()
                    heard = True
                    silence.reschedule(None)  # the first message comes at once, later ones when they come
                    self._request.revision = response.revision
                    if response.events:
                        self._on_events(response.events)
        except grpc.aio.AioRpcError as rpc_error:
            error = decode(rpc_error)
            line.failed(error)
            raise error from None
        except TimeoutError:
            if line.alone:
                raise
            message = f"{line.address} gave no answer within {min(self._timeout, line.timeout):g} s"
            error = ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_ANSWER", message)
            line.failed(error)
            raise error from None
        finally:
            if heard:
                self._received_at = loop.time()
                self._last_time = False
            call.cancel()

    def _bear_silence(self) -> None:
        """Return if it is worth to try again."""
        if self._received_at is None or self._last_time:
            raise SettingError(
                f"no rendezvous service answered at {self._endpoint} within {self._timeout:g} s"
            ) from None
        self._last_time = True

    def _bear(self, error: ServiceError, now: float) -> None:
        """Return if it is worth to try again."""
        if self._is_gap(error):
            return
        if error.code in _RETRYABLE and self._received_at is not None and not self._last_time:
            self._last_time = now - self._received_at >= self._timeout
            return
        # Nobody owns the run just now, and somebody will.
        if (
            error.reason == "NOT_OWNER"
            and self._received_at is None
            and now < self._requested_at + self._timeout
        ):
            return
        raise refusal(self._endpoint, self._tls, error) from None

    def _is_gap(self, error: ServiceError) -> bool:
        if error.reason != "EVENTS_COMPACTED":
            return False
        oldest = error.metadata.get("oldest_revision", "?")
        self._on_gap(f"events {self._request.revision + 1} to {oldest} (not included) are no longer kept")
        self._request.revision = 0
        return True
