"""The command line gets every event once, over any number of connections, and reports gaps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from rallypoint.cli.event_stream import Following, last_events
from rallypoint.rendezvous.v1 import rendezvous_service_pb2 as pb
from rallypoint.rendezvous.v1 import rendezvous_service_pb2_grpc as pb_grpc
from rallypoint.rpc.channel import open_channel
from rallypoint.rpc.endpoint import CallTarget, SettingError
from rallypoint.rpc.errors import ServiceError, encode
from rallypoint.rpc.runtime_folder import new_run_socket

Code = grpc.StatusCode
DRAINING = ServiceError(Code.UNAVAILABLE, "DRAINING", "the server is going away")
COMPACTED = ServiceError(
    Code.OUT_OF_RANGE, "EVENTS_COMPACTED", "no longer kept", metadata={"oldest_revision": "9"}
)
NOT_FOUND = ServiceError(Code.NOT_FOUND, "RUN_NOT_FOUND", "there is no run 'digits'")


SILENCE = ServiceError(Code.UNKNOWN, "", "never said: the call is left open")


class Scripted:
    """Ends each call by its script: with the messages, and the error if there is one."""

    def __init__(self, *script: tuple[list[list[int]], ServiceError | None]) -> None:
        self.script = list(script)
        self.asked: list[Any] = []

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> None:
        self.asked.append(request.after_revision)
        messages, error = self.script.pop(0)
        if error is SILENCE:
            await asyncio.Event().wait()
        revision = request.after_revision
        for revisions in messages:
            revision = max([revision, *revisions])
            events = [pb.Event(revision=each) for each in revisions]
            await context.write(pb.WatchEventsResponse(events=events, revision=revision))
        if error is not None:
            await context.abort_with_status(encode(error))

    async def ListEvents(self, request: pb.ListEventsRequest, context: Any) -> pb.ListEventsResponse:
        self.asked.append((request.page_size, request.page_token, request.newest_first))
        (revisions, *_), error = self.script.pop(0)
        if error is not None:
            await context.abort_with_status(encode(error))
        events = [pb.Event(revision=each) for each in revisions]
        return pb.ListEventsResponse(events=events, next_page_token="more" if self.script else "")


@asynccontextmanager
async def serving(servicer: Scripted) -> AsyncIterator[str]:
    """Serve; yield the address."""
    server = grpc.aio.server()
    methods: dict[str, Any] = {
        "WatchEvents": grpc.unary_stream_rpc_method_handler(
            servicer.WatchEvents,
            request_deserializer=pb.WatchEventsRequest.FromString,
            response_serializer=pb.WatchEventsResponse.SerializeToString,
        ),
        "ListEvents": grpc.unary_unary_rpc_method_handler(
            servicer.ListEvents,
            request_deserializer=pb.ListEventsRequest.FromString,
            response_serializer=pb.ListEventsResponse.SerializeToString,
        ),
    }
    service = "rallypoint.rendezvous.v1.RendezvousService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    with new_run_socket("rendezvous", "scripted") as endpoint:
        server.add_insecure_port(endpoint)
        await server.start()
        try:
            yield endpoint
        finally:
            await server.stop(0)


async def followed(
    servicer: Scripted, revision: int = 0, patience: float = 10.0
) -> tuple[list[int], list[str], str]:
    """Follow to the end: return the revisions received, the gaps reported, and the error."""
    seen: list[int] = []
    gaps: list[str] = []
    note: Callable[[Any], None] = lambda events: seen.extend(event.revision for event in events)  # noqa: E731
    async with serving(servicer) as address:
        following = Following(
            CallTarget(address, None, patience),
            pb.WatchEventsRequest(run_id="digits", after_revision=revision),
            on_events=note,
            on_gap=gaps.append,
            jitter=lambda: 1.0,
        )
        try:
            await following.run()
        except SettingError as error:
            return seen, gaps, str(error).replace(address, "HERE")
    return seen, gaps, ""


async def test_a_run_is_followed_to_its_end() -> None:
    """The server ends the stream when the run is closed."""
    servicer = Scripted(([[], [4, 5], [6]], None))
    assert await followed(servicer, revision=3) == ([4, 5, 6], [], "")
    assert servicer.asked == [3]


async def test_a_broken_connection_is_resumed_where_it_broke() -> None:
    """No event comes twice, however often the connection breaks."""
    servicer = Scripted(([[1, 2]], DRAINING), ([], DRAINING), ([[], [3]], DRAINING), ([[4]], None))
    assert await followed(servicer) == ([1, 2, 3, 4], [], "")
    assert servicer.asked == [0, 2, 2, 3]


async def test_a_gap_is_reported_and_the_kept_events_are_shown() -> None:
    """A client that was away for too long must not believe that nothing happened."""
    servicer = Scripted(([[1, 2]], DRAINING), ([], COMPACTED), ([[9, 10]], None))
    gap = "events 3 to 9 (not included) are no longer kept"
    assert await followed(servicer) == ([1, 2, 9, 10], [gap], "")
    assert servicer.asked == [0, 2, 0]


async def test_a_service_that_never_answered_is_reported_at_once() -> None:
    """The other commands do so too."""
    assert await followed(Scripted(([], DRAINING))) == ([], [], "HERE: the server is going away (DRAINING)")


async def test_a_service_that_stays_away_is_given_up() -> None:
    """It is given up after the requested timeout."""
    servicer = Scripted(([[1]], DRAINING), *[([], DRAINING)] * 100)
    assert await followed(servicer, patience=2.0) == ([1], [], "HERE: the server is going away (DRAINING)")
    assert 2 <= len(servicer.asked) <= 40


async def test_a_client_that_was_suspended_retries_once_more() -> None:
    """After a stop by Ctrl-Z, for example, all of the time is used up, though the service may have been there."""
    servicer = Scripted(([[1]], DRAINING), ([], SILENCE), ([[2]], None))
    assert await followed(servicer, patience=0.2) == ([1, 2], [], "")
    servicer = Scripted(([[1]], DRAINING), *[([], SILENCE)] * 3)
    silent = "no rendezvous service answered at HERE within 0.2 s"
    assert await followed(servicer, patience=0.2) == ([1], [], silent)
    assert len(servicer.asked) == 3


@pytest.mark.parametrize("before", [[], [[1]]])
async def test_a_refusal_is_final(before: list[list[int]]) -> None:
    """Another request would get the same reply."""
    script = [(before, DRAINING)] if before else []
    seen, _, error = await followed(Scripted(*script, ([], NOT_FOUND)))
    assert (seen, error) == (before[0] if before else [], "HERE: there is no run 'digits' (RUN_NOT_FOUND)")


async def test_the_last_events_are_put_together_from_pages() -> None:
    """Short and empty pages are no end; one extra event is requested to find out if there are older ones."""

    async def last(most: int, *script: tuple[list[list[int]], ServiceError | None]) -> Any:
        servicer = Scripted(*script)
        async with serving(servicer) as address:
            channel = open_channel(address)
            stub: pb_grpc.RendezvousServiceAsyncStub = pb_grpc.RendezvousServiceStub(channel)
            events, older = await last_events(stub, "digits", pb.EventFilter(), most)
            await channel.close()
        return [event.revision for event in events], older, servicer.asked

    assert await last(3, ([[9, 8]], None), ([[]], None), ([[7, 6]], None)) == (
        [7, 8, 9],
        True,
        [(4, "", True), (2, "more", True), (2, "more", True)],
    )
    assert (await last(3, ([[9, 8]], None), ([[7]], None)))[:2] == ([7, 8, 9], False)
    assert (await last(50_000, ([[9]], None)))[2] == [(10_000, "", True)]
    assert (await last(3, ([[9]], None), ([[]], COMPACTED)))[:2] == ([9], False)
